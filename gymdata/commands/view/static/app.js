// What every page has: color scheme, keyboard, rows to click, copying, and a run that grows while it is watched.

const root = document.documentElement;
const $ = (selector) => document.querySelector(selector);
const POLL_MS = 1500;
const PAGES = { r: "/", p: "/pairs", c: "/comparisons", t: "/training" };

$("#theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  document.cookie = `theme=${root.dataset.theme}; path=/; max-age=31536000; samesite=strict`;
});
$("#keys").addEventListener("click", () => $("#help").showModal());

document.addEventListener("click", (event) => {
  const copy = event.target.closest("[data-copy]");
  if (copy) {
    navigator.clipboard.writeText(copy.dataset.copy).then(() => {
      const was = copy.textContent;
      copy.textContent = "copied";
      setTimeout(() => (copy.textContent = was), 1200);
    });
    return;
  }
  const row = event.target.closest("tr[data-href]");
  if (row && !event.target.closest("a, button, input") && !getSelection().toString()) location.href = row.dataset.href;
});

// On a phone the pages do not fit beside each other.
$(".top nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });

document.addEventListener("change", (event) => {
  if (event.target.matches("#filters :is(select, [type=checkbox])")) event.target.form.requestSubmit();
});
document.addEventListener("submit", (event) => {
  // An empty box says nothing: it need not stand in the address.
  for (const box of event.target.querySelectorAll("input, select, textarea")) if (!box.value) box.disabled = true;
});
addEventListener("pageshow", () => document.querySelectorAll("form :disabled").forEach((box) => (box.disabled = false)));

const sides = $("#sides");
sides?.addEventListener("click", (event) => {
  const side = event.target.closest("[data-side]")?.dataset.side;
  if (side) showSide(side);
});
export function showSide(side) {
  $(".split").dataset.shown = side;
  for (const one of sides?.querySelectorAll("button") ?? []) one.setAttribute("aria-pressed", one.dataset.side === side);
}

function step(by) {
  const rows = [...document.querySelectorAll("tr[data-href], .group > summary")].filter((row) => row.offsetParent);
  if (!rows.length) return;
  const at = rows.findIndex((row) => row.classList.contains("on"));
  const next = rows[Math.max(0, Math.min(rows.length - 1, at < 0 ? 0 : at + by))];
  rows[at]?.classList.remove("on");
  next.classList.add("on");
  next.scrollIntoView({ block: "nearest" });
  if (next.matches("summary")) next.focus();
}

let awaitingPage = false;
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (event.target.matches("input, textarea, select")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (awaitingPage) {
    awaitingPage = false;
    if (PAGES[event.key]) location.href = PAGES[event.key];
    return;
  }
  const follow = (selector) => $(selector)?.click();
  switch (event.key) {
    case "/": $("#where")?.focus(); event.preventDefault(); break;
    case "?": $("#help").showModal(); break;
    case "j": step(1); break;
    case "k": step(-1); break;
    case "[": follow("a[rel=prev]"); break;
    case "]": follow("a[rel=next]"); break;
    case "u": follow("#up"); break;
    case "g": awaitingPage = true; break;
    case "Enter": if (document.activeElement === document.body && $("tr.on")) location.href = $("tr.on").dataset.href; break;
  }
});

// A run that is being collected, or a model that is being trained: when something has changed, the results of this very address are fetched again.
let version = root.dataset.version;
async function look() {
  if (document.hidden) return;
  try {
    const state = await (await fetch(`/data/state?page=${location.pathname}`)).json();
    $("#live").hidden = !state.growing;
    if (state.version === version) return;
    version = state.version;
    const results = $("#results");
    if (!results) return;
    const address = new URL(location.href);
    address.searchParams.set("fragment", "1");
    const answer = await fetch(address);
    if (!answer.ok) return;
    const open = new Set([...results.querySelectorAll("details[open] .name")].map((name) => name.textContent));
    const on = results.querySelector("tr.on")?.dataset.href;
    results.innerHTML = await answer.text();
    for (const name of results.querySelectorAll("details .name")) if (open.has(name.textContent)) name.closest("details").open = true;
    if (on) results.querySelector(`tr[data-href="${CSS.escape(on)}"]`)?.classList.add("on");
  } catch {
    // The server has ended: what is shown stays.
  }
}
setInterval(look, POLL_MS);
