// A click on a node shows what its run.json says.

function choose(node) {
  for (const one of document.querySelectorAll(".node")) one.classList.toggle("on", one === node);
  for (const one of document.querySelectorAll(".nodefacts")) one.hidden = one.id !== `node-${node.dataset.node}`;
  for (const edge of document.querySelectorAll(".edge")) edge.classList.toggle("on", edge.dataset.ends.split(" ").includes(node.dataset.node));
  history.replaceState(null, "", `#${node.dataset.node}`);
}
document.addEventListener("click", (event) => {
  const node = event.target.closest(".node");
  if (node) choose(node);
});
document.addEventListener("keydown", (event) => {
  const node = event.target.closest?.(".node");
  if (node && (event.key === "Enter" || event.key === " ")) {
    event.preventDefault();
    choose(node);
  }
});
const first = document.querySelector(`.node[data-node="${CSS.escape(location.hash.slice(1))}"]`) ?? document.querySelector(".node");
if (first) choose(first);
