// The SQL page: run with Ctrl-Enter, insert a column where the cursor is, keep statements by name in this browser.

const box = document.querySelector("#sql");
const form = document.querySelector("#sqlform");
const KEY = "gymdata.sql";

box.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
document.addEventListener("click", (event) => {
  const name = event.target.closest("[data-insert]")?.dataset.insert;
  if (!name) return;
  const quoted = /^[a-z_][a-z0-9_]*$/.test(name) ? name : `"${name.replaceAll('"', '""')}"`;
  box.setRangeText(quoted, box.selectionStart, box.selectionEnd, "end");
  box.focus();
});

const kept = () => JSON.parse(localStorage.getItem(KEY) ?? "{}");
function list() {
  const place = document.querySelector("#mine");
  place.replaceChildren(...Object.entries(kept()).map(([name, sql]) => {
    const item = document.createElement("li");
    const link = document.createElement("a");
    link.href = `/sql?q=${encodeURIComponent(sql)}`;
    link.textContent = name;
    const drop = document.createElement("button");
    drop.type = "button";
    drop.className = "plain";
    drop.textContent = "✕";
    drop.title = "Forget";
    drop.addEventListener("click", () => {
      const { [name]: _, ...others } = kept();
      localStorage.setItem(KEY, JSON.stringify(others));
      list();
    });
    item.append(link, drop);
    return item;
  }));
}
document.querySelector("#save").addEventListener("click", (event) => {
  const old = form.querySelector("#savename");
  if (old) return old.focus();
  const name = document.createElement("input");
  name.id = "savename";
  name.placeholder = "name, then Enter";
  name.setAttribute("aria-label", "Name of the saved statement");
  name.addEventListener("keydown", (key) => {
    if (key.key === "Enter") {
      key.preventDefault();
      if (name.value.trim() && box.value.trim()) localStorage.setItem(KEY, JSON.stringify({ ...kept(), [name.value.trim()]: box.value }));
      name.remove();
      list();
    } else if (key.key === "Escape") name.remove();
  });
  event.target.before(name);
  name.focus();
});
list();
