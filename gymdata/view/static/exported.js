// An exported file: pick a rollout, draw its tokens from the evidence in the page. Follows tokens.js in one script.

const evidence = JSON.parse(document.querySelector("#evidence").textContent);
const drawn = new Set();

function pick(number) {
  for (const one of document.querySelectorAll("article")) one.hidden = one.id !== `rollout-${number}`;
  for (const one of document.querySelectorAll("[data-pick]")) one.classList.toggle("on", one.dataset.pick === String(number));
  const article = document.querySelector(`#rollout-${number}`);
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
const chosen = () => Number(/^#r(\d+)$/.exec(location.hash)?.[1] ?? 0);
addEventListener("hashchange", () => pick(chosen()));
document.querySelector("#theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
pick(chosen());
