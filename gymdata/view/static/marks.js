// Marks of people: what is typed is sent at once, and the marks of this page are drawn again as the server has them.

const token = document.documentElement.dataset.marks;
const error = (text) => {
  const place = document.querySelector("#markerror");
  if (place) place.textContent = text;
};

function person() {
  const box = document.querySelector("#who");
  return box?.value.trim() || localStorage.getItem("gymdata-who") || "";
}

export async function mark(said) {
  const answer = await fetch("/data/mark", {
    method: "POST",
    headers: { "content-type": "application/json", "x-gymdata-token": token },
    body: JSON.stringify({ who: person(), ...said }),
  });
  const result = await answer.json();
  if (!answer.ok) error(result.error);
  return answer.ok;
}

async function redraw() {
  const address = new URL(location.href);
  const page = new DOMParser().parseFromString(await (await fetch(address)).text(), "text/html");
  document.querySelector("#marks").replaceWith(page.querySelector("#marks"));
  remember();
}

// What was typed and not sent, by rollout and box: it is there again after another mark, and after leaving the page.
const draft = (form) => `gymdata-${document.querySelector("#marks").dataset.id}-${form.dataset.kind}`;

function remember() {
  const box = document.querySelector("#who");
  if (!box) return;
  box.value = localStorage.getItem("gymdata-who") || box.value;
  box.addEventListener("change", () => {
    localStorage.setItem("gymdata-who", box.value.trim());
    own();
  });
  own();
  for (const form of document.querySelectorAll("#marks form.mark")) {
    const typed = sessionStorage.getItem(draft(form));
    if (typed) form.elements.value.value = typed;
  }
}

// People take back what they said themselves.
function own() {
  for (const button of document.querySelectorAll("#marks [data-of]")) button.hidden = !JSON.parse(button.dataset.of).includes(person());
}

async function send(said, form) {
  const id = document.querySelector("#marks").dataset.id;
  if (!(await mark({ id, ...said }))) return;
  if (form) sessionStorage.removeItem(draft(form));
  await redraw();
}

document.addEventListener("input", (event) => {
  const form = event.target.closest('form.mark:not([data-kind="choice"])');
  if (form) sessionStorage.setItem(draft(form), event.target.value);
});

document.addEventListener("submit", (event) => {
  const form = event.target.closest("form.mark");
  if (!form) return;
  event.preventDefault();
  const kind = form.dataset.kind;
  const text = (form.elements.value?.value ?? "").trim();
  if (text || kind === "reward") send({ kind, value: text }, form);
});
document.addEventListener("change", (event) => {
  const form = event.target.closest('form.mark[data-kind="choice"]');
  if (form && event.target.value) send({ kind: "choice", over: event.target.value });
});
document.addEventListener("click", (event) => {
  const button = event.target.closest("#marks [data-untag], #marks button[data-kind]");
  if (!button) return;
  if (button.dataset.untag) send({ kind: "untag", value: button.dataset.untag });
  else send({ kind: button.dataset.kind, value: button.dataset.value, over: button.dataset.over });
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, textarea, select")) return;
  if (!document.querySelector("#marks form")) return;
  const focus = (kind) => document.querySelector(`#marks form[data-kind="${kind}"] input`)?.focus();
  switch (event.key) {
    case "m": focus("tag"); event.preventDefault(); break;
    case "n": focus("comment"); event.preventDefault(); break;
    case "+": send({ kind: "tag", value: "good" }); break;
    case "-": send({ kind: "tag", value: "bad" }); break;
    case "b": document.querySelector('#marks button[data-kind$="_task"]')?.click(); break;
  }
});
document.querySelector("#save")?.addEventListener("click", async () => {
  const name = document.querySelector("#selection").value.trim();
  if (name && (await mark({ kind: "selection", value: location.pathname + location.search, over: name }))) location.reload();
});
remember();
