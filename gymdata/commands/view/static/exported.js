// An exported file: pick a rollout, a group or a pair, or find those that contain a text; draw a rollout's tokens from the evidence in the page.
// Follows tokens.js in one script.

const evidence = JSON.parse(document.querySelector("#evidence").textContent);
const drawn = new Set();

const box = document.querySelector("#find");
const count = document.querySelector("#count");
const links = [...document.querySelectorAll("[data-pick]")];
const textOf = (element) => element.textContent.toLowerCase();
// What a link leads to, and the link itself, before tokens are drawn.
const searched = links.map((link) => `${textOf(link)}\n${textOf(document.querySelector(`#at-${link.dataset.pick}`))}`);

function find() {
  const text = box.value.trim().toLowerCase();
  links.forEach((link, n) => {
    link.hidden = !searched[n].includes(text);
  });
  const hits = links.filter((link) => !link.hidden && link.dataset.pick.startsWith("r"));
  for (const list of document.querySelectorAll(".picker details")) {
    list.hidden = !list.querySelector("a:not([hidden])");
  }
  count.textContent = text ? `in ${hits.length} of ${evidence.length} ${evidence.length === 1 ? "rollout" : "rollouts"}` : "";
  highlight(text);
}

// Highlights a text in the article that is shown, without a change to its elements.
function highlight(text) {
  if (!CSS.highlights) return;
  const ranges = [];
  const article = document.querySelector("article:not([hidden])");
  const walker = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
  while (text && walker.nextNode()) {
    const lower = walker.currentNode.data.toLowerCase();
    for (let at = lower.indexOf(text); at >= 0 && at + text.length <= walker.currentNode.length; at = lower.indexOf(text, at + text.length)) {
      const range = new Range();
      range.setStart(walker.currentNode, at);
      range.setEnd(walker.currentNode, at + text.length);
      ranges.push(range);
    }
  }
  CSS.highlights.set("match", new Highlight(...ranges));
}

function pick(name) {
  draw(name);
  if (box.value.trim()) find();
}

function draw(name) {
  for (const one of document.querySelectorAll("article[id]")) one.hidden = one.id !== `at-${name}`;
  for (const one of document.querySelectorAll("[data-pick]")) one.classList.toggle("on", one.dataset.pick === name);
  const article = document.querySelector(`#at-${name}`);
  const number = name.startsWith("r") ? Number(name.slice(1)) : -1;
  if (!article || drawn.has(number) || !evidence[number]) return;
  drawn.add(number);
  const data = evidence[number];
  const buttons = [...article.querySelectorAll("[data-color]")];
  for (const button of buttons) {
    const key = button.dataset.color;
    button.disabled = !["mask", "turn"].includes(key) && !data.turns.some((turn) => turn[key]);
  }
  new TokenView(article.querySelector(".tokenview"), data, { legend: article.querySelector(".legend"), buttons, tip: document.querySelector("#tip") });
}
const chosen = () => links.find((link) => link.hash === location.hash)?.dataset.pick ?? "r0";
addEventListener("hashchange", () => pick(chosen()));
box.addEventListener("input", find);
box.addEventListener("keydown", (event) => {
  const first = links.find((link) => !link.hidden && link.dataset.pick.startsWith("r")) ?? links.find((link) => !link.hidden);
  if (event.key === "Enter" && first) location.hash = first.dataset.pick;
});
addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target.matches("input")) return;
  event.preventDefault();
  box.focus();
});
document.querySelector("#theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
pick(chosen());
