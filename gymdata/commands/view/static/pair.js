// A pair: a click on a token of either side says how DPO trains it.

import { explainInPair } from "/static/why.js";

const drawer = document.querySelector("#why");
document.querySelector("main").addEventListener("click", (event) => {
  const token = event.target.closest(".difftoks [data-k]");
  if (!token) return;
  const { side } = token.closest("[data-side]").dataset;
  explainInPair(drawer, { id: drawer.dataset.pair, n: drawer.dataset.file, side, k: token.dataset.k }, token.textContent);
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") drawer.hidden = true;
});
