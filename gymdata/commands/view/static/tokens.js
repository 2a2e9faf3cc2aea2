// The tokens of a rollout from their recorded ids: drawn once, colored by class, looked up when pointed at.
// Needs nothing but the page, so that an exported file can carry it as it is.

const CHUNK = 400;
const $ = (selector, within = document) => within.querySelector(selector);

function make(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") node.className = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

// A piece on one line.
const plain = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
const level = (value, bounds) => bounds.findIndex((bound) => value < bound) < 0 ? bounds.length : bounds.findIndex((bound) => value < bound);

// How each coloring turns the values of a sampled token into a class, and what its legend says.
const COLORS = {
  logprob: {
    of: (turn, k) => (turn.logprob?.[k] == null ? "" : `h${level(-turn.logprob[k], [0.1, 0.5, 1.2, 2.3, 4.6])}`),
    legend: ["certain", "h", 6, "unlikely", "sampled probability, 1 to below 0.01"],
  },
  entropy: {
    of: (turn, k) => (turn.entropy?.[k] == null ? "" : `e${level(turn.entropy[k], [0.1, 0.3, 0.7, 1.3, 2.2])}`),
    legend: ["0 nat", "e", 6, "over 2.2", "entropy of the model's distribution"],
  },
  advantage: {
    of: (turn, k) => signed(turn.advantage?.[k], [1e-9, 0.5, 1.2]),
    legend: ["worse", ["n3", "n2", "n1", "z", "p1", "p2", "p3"], 0, "better", "advantage of each sampled token"],
  },
  mask: {
    of: (turn, k) => (turn.mask ? `m${turn.mask[k]}` : "m1"),
    legend: ["", ["m1"], 0, "trained", "struck through: sampled, but masked out; grey: context"],
  },
  ratio: {
    of: (turn, k) => (turn.ratio?.[k] == null ? "" : signed(Math.log(turn.ratio[k]), [0.01, 0.1, 0.3])),
    legend: ["less likely now", ["n3", "n2", "n1", "z", "p1", "p2", "p3"], 0, "more likely", "audited model against the sampler"],
  },
  turn: { of: (_, __, number) => `u${number % 4}`, legend: ["", ["u0", "u1", "u2", "u3"], 0, "turns", "each turn's sampled tokens"] },
};

function signed(value, [zero, one, two]) {
  if (value == null || Number.isNaN(value)) return "";
  const size = Math.abs(value);
  if (size < zero) return "z";
  return `${value > 0 ? "p" : "n"}${size < one ? 1 : size < two ? 2 : 3}`;
}

export class TokenView {
  constructor(place, data, { legend, buttons, tip, alternatives, explain, chosen }) {
    Object.assign(this, { place, data, legend, tip, alternatives, explain, chosen });
    this.buttons = buttons;
    this.selected = null;
    this.special = new Set(data.special);
    this.draw();
    this.color("logprob");
    place.addEventListener("pointerover", (event) => this.point(event.target.closest(".t"), event));
    place.addEventListener("pointerleave", () => (tip.hidden = true));
    place.addEventListener("click", (event) => {
      const token = event.target.closest(".t.g");
      if (token) this.select(token, true);
    });
    for (const button of buttons) button.addEventListener("click", () => this.color(button.dataset.color));
  }

  text(id) {
    return this.data.text[id] ?? `${id} `;
  }

  draw() {
    const all = document.createDocumentFragment();
    this.nodes = [];
    for (const [number, turn] of this.data.turns.entries()) {
      const head = make("div", { class: "turnhead", id: `turn-${number}` }, make("b", {}, `turn ${number}`));
      head.append(`${turn.context.length.toLocaleString()} new context`, make("span", {}, `${turn.ids.length.toLocaleString()} ${turn.rendered ? "rendered from text" : "sampled"}`));
      if (turn.finish) head.append(make("span", {}, turn.finish));
      if (turn.reward != null) head.append(make("span", {}, `reward ${Number(turn.reward.toPrecision(4))}`));
      if (turn.agent) head.append(make("span", {}, `agent ${turn.agent}`));
      if (turn.kind !== "first" && turn.kind !== "continues") {
        head.append(make("span", { class: "kind" }, `${turn.kind}: keeps ${turn.prefix.toLocaleString()} tokens of turn ${turn.parent}`));
      }
      const body = make("div", { class: "toks" });
      const sampled = [];
      const long = turn.context.length + turn.ids.length > 2 * CHUNK;
      let chunk = long ? make("div", { class: "chunk" }) : body;
      let count = 0;
      const put = (id, k) => {
        const text = this.text(id);
        const node = make("span", { class: `t ${k == null ? "c" : "g"}${this.special.has(id) ? " sp" : ""}` });
        if (text.includes("\n")) {
          for (const [n, part] of text.split("\n").entries()) {
            if (n) node.append(make("span", { class: "nl" }, "⏎"), "\n");
            node.append(part);
          }
        } else node.textContent = text;
        node.token = { id, k, turn: number };
        if (k != null) sampled.push(node);
        chunk.append(node);
        if (long && ++count >= CHUNK && (text.includes("\n") || count > CHUNK + 200)) {
          body.append(chunk);
          chunk = make("div", { class: "chunk" });
          count = 0;
        }
      };
      for (const id of turn.context) put(id, null);
      for (const [k, id] of turn.ids.entries()) put(id, k);
      if (long) body.append(chunk);
      this.nodes.push(sampled);
      all.append(make("div", { class: turn.rendered ? "turn rendered" : "turn" }, head, body));
    }
    this.place.replaceChildren(all);
  }

  color(name) {
    this.by = name;
    for (const button of this.buttons) button.setAttribute("aria-pressed", button.dataset.color === name);
    const scheme = COLORS[name];
    for (const [number, nodes] of this.nodes.entries()) {
      const turn = this.data.turns[number];
      for (const [k, node] of nodes.entries()) {
        const special = this.special.has(turn.ids[k]) ? " sp" : "";
        node.className = `t g${special} ${scheme.of(turn, k, number)}${node === this.selected ? " sel" : ""}`;
      }
    }
    const [low, steps, count, high, what] = scheme.legend;
    const names = Array.isArray(steps) ? steps : Array.from({ length: count }, (_, n) => `${steps}${n}`);
    const ramp = make("span", { class: "ramp" }, ...names.map((one) => make("span", { class: `t ${one}` })));
    this.legend.replaceChildren(...(low ? [low] : []), ramp, high, make("span", {}, `· ${what}`));
  }

  facts({ id, k, turn: number }) {
    const turn = this.data.turns[number];
    const rows = [["id", id], ["turn", k == null ? `${number}, context` : `${number}, ${turn.rendered ? "rendered" : "sampled"} ${k + 1} of ${turn.ids.length}`]];
    if (k == null) return rows;
    if (turn.rendered) rows.push(["rendered", "from text, not sampled (T213)"]);
    const shown = (value, digits = 4) => (value && Math.abs(value) < 10 ** -digits ? Number(value).toExponential(1) : Number(value).toFixed(digits).replace(/\.?0+$/, ""));
    const logprob = turn.logprob?.[k];
    if (logprob != null) rows.push(["logprob", shown(logprob)], ["probability", shown(Math.exp(logprob))]);
    if (turn.rank) rows.push(["rank", turn.rank[k] > turn.top ? `over ${turn.top}` : turn.rank[k]]);
    if (turn.entropy?.[k] != null) rows.push(["entropy", shown(turn.entropy[k])]);
    if (turn.advantage?.[k] != null) rows.push(["advantage", shown(turn.advantage[k])]);
    if (turn.mask) rows.push(["loss mask", turn.mask[k]]);
    if (turn.ratio?.[k] != null) rows.push(["ratio", shown(turn.ratio[k], 6)]);
    return rows;
  }

  point(node, event) {
    if (!node?.token) {
      this.tip.hidden = true;
      return;
    }
    this.show(node, event?.clientX, event?.clientY);
  }

  show(node, x, y) {
    const { id, k, turn } = node.token;
    const list = make("dl");
    for (const [name, value] of this.facts(node.token)) list.append(make("dt", {}, name), make("dd", {}, String(value)));
    this.tip.replaceChildren(make("div", { class: "piece" }, plain(this.text(id))), list);
    this.tip.hidden = false;
    const box = node.getBoundingClientRect();
    const place = () => {
      const size = this.tip.getBoundingClientRect();
      const left = Math.min(Math.max(8, (x ?? box.left) + 12), innerWidth - size.width - 8);
      const below = (y ?? box.bottom) + 16;
      this.tip.style.left = `${left}px`;
      this.tip.style.top = `${below + size.height > innerHeight ? Math.max(8, (y ?? box.top) - size.height - 12) : below}px`;
    };
    place();
    if (k == null || !this.alternatives) return;
    this.pointed = node;
    clearTimeout(this.soon);
    this.soon = setTimeout(async () => {
      const listed = await this.alternatives(turn, k);
      if (this.pointed !== node || this.tip.hidden || !listed?.length) return;
      const rows = listed.map((one) => make("div", one.id === id ? { class: "mine" } : {}, make("span", {}, plain(one.text)), make("span", {}, Math.exp(one.log_prob).toFixed(4))));
      this.tip.append(make("div", { class: "alts" }, ...rows));
      place();
    }, 120);
  }

  select(node, explain = false) {
    this.selected?.classList.remove("sel");
    this.selected = node;
    node.classList.add("sel");
    node.scrollIntoView({ block: "nearest" });
    this.chosen?.(node.token);
    if (explain) this.explain?.(node.token);
  }

  move(by) {
    const { turn, k } = this.selected?.token ?? { turn: 0, k: by > 0 ? -1 : 0 };
    let [t, n] = [turn, k + by];
    while (this.nodes[t] && !this.nodes[t][n]) {
      t += by > 0 ? 1 : -1;
      n = by > 0 ? 0 : (this.nodes[t]?.length ?? 0) - 1;
    }
    const node = this.nodes[t]?.[n];
    if (!node) return;
    this.select(node);
    this.show(node);
  }

  go(turn, k) {
    const head = $(`#turn-${turn}`, this.place);
    if (k != null && this.nodes[turn]?.[k]) this.select(this.nodes[turn][k]);
    else head?.scrollIntoView({ block: "start" });
  }
}

async function boot() {
  const place = $("#tokenview");
  if (!place) return;
  const about = place.dataset.about;
  const answer = await (await fetch(`/data/tokens?${about}`)).json();
  if (answer.error) {
    place.replaceChildren(make("div", { class: "problem" }, answer.error));
    return;
  }
  const known = new Map();
  const drawer = $("#why");
  const view = new TokenView(place, answer, {
    legend: $("#legend"),
    buttons: [...document.querySelectorAll("[data-color]")],
    tip: $("#tip"),
    alternatives: async (turn, k) => {
      const key = `${turn}.${k}`;
      if (!known.has(key)) known.set(key, fetch(`/data/token?${about}&turn=${turn}&k=${k}`).then((r) => r.json()).then((r) => r.alternatives));
      return known.get(key);
    },
    explain: async ({ turn, k }) => {
      const { explain } = await import("/static/why.js");
      $("#tip").hidden = true;
      await explain(drawer, about, turn, k);
    },
    chosen: ({ turn, k }) => {
      history.replaceState(null, "", `#t=${turn}.${k}`);
      mark(turn);
    },
  });
  const mark = (turn) => {
    for (const one of document.querySelectorAll("#messages [data-turn]")) one.classList.toggle("on", one.dataset.turn === String(turn));
  };
  $("#messages").addEventListener("click", (event) => {
    const message = event.target.closest("[data-turn]");
    if (!message || getSelection().toString()) return;
    event.preventDefault();
    history.replaceState(null, "", `#t=${message.dataset.turn}`);
    mark(message.dataset.turn);
    showSide("tokens");
    view.go(Number(message.dataset.turn));
  });
  const showSide = (side) => {
    $(".split").dataset.shown = side;
    for (const one of document.querySelectorAll("#sides button")) one.setAttribute("aria-pressed", one.dataset.side === side);
  };
  const jump = () => {
    const [, turn, k] = /^#t=(\d+)(?:\.(\d+))?$/.exec(location.hash) ?? [];
    if (turn == null) return;
    showSide("tokens");
    view.go(Number(turn), k == null ? null : Number(k));
    mark(turn);
  };
  addEventListener("hashchange", jump);
  jump();
  document.addEventListener("keydown", (event) => {
    if (event.target.matches("input, textarea, select, button, summary") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
      view.move(event.key === "ArrowRight" ? 1 : -1);
      event.preventDefault();
    } else if (event.key === "Enter" && view.selected) {
      view.explain(view.selected.token);
      event.preventDefault();
    } else if (event.key === "Escape") {
      $("#tip").hidden = true;
      drawer.hidden = true;
    } else if (event.key === "j" || event.key === "k") {
      const at = (view.selected?.token.turn ?? -1) + (event.key === "j" ? 1 : -1);
      if (view.nodes[at]?.[0]) view.select(view.nodes[at][0]);
      $(`#turn-${at}`)?.scrollIntoView({ block: "start" });
    }
  });
  document.documentElement.dataset.ready = "1";
}

if (document.documentElement.dataset.exported === undefined) boot();
