// Why one sampled token is trained: the arithmetic, and sliders for the bounds of the losses.

import { html, render, useEffect, useState } from "/static/vendor/htm-preact.js";

const digits = (value, n = 4) => (value == null ? "–" : Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-4) ? value.toExponential(2) : String(Number(value.toFixed(n))));

// How a loss limits a ratio: the losses themselves, their bounds and defaults come with the token.
const LIMITS = {
  clipped: { what: "no gradient beyond the bounds on the side that the advantage pushes to",
    keeps: (r, a, b) => !((a > 0 && r > b.high) || (a < 0 && r < b.low)), weight: (r) => r },
  capped: { what: "every token keeps its gradient; its weight stays within the bounds",
    keeps: () => true, weight: (r, b) => Math.max(Math.min(r, b.high), b.low ?? 0) },
  masked: { what: "tokens outside the bounds are masked out", keeps: (r, _, b) => r <= b.high && r >= (b.low ?? 0), weight: (r) => r },
};

function Loss({ loss, ratio, advantage }) {
  const limits = LIMITS[loss.limits];
  const [bounds, setBounds] = useState(Object.fromEntries(loss.bounds.map(({ key, start }) => [key, start])));
  const keeps = ratio == null ? null : limits.keeps(ratio, advantage ?? 0, bounds);
  return html`<section class="loss">
    <header><h3>${loss.name}</h3><span class="verdict ${keeps === false ? "bad" : "good"}">${keeps == null ? "" : keeps ? "kept" : "no gradient"}</span></header>
    <p class="muted">${limits.what}${loss.of === "sequence" ? ", of the whole sequence" : ""}</p>
    ${loss.bounds.map(({ key, label, min, max, step }) => html`<label class="slide"><span>${label}</span>
      <input type="range" aria-label=${`${loss.name} ${label}`} min=${min} max=${max} step=${step} value=${bounds[key]} onInput=${(e) => setBounds({ ...bounds, [key]: Number(e.target.value) })} />
      <output>${bounds[key]}</output></label>`)}
    ${ratio != null && html`<p class="counts">weight here <b>${digits(limits.weight(ratio, bounds))}</b></p>`}
  </section>`;
}

function Credit({ credit }) {
  const advantage = credit.saved ?? credit.computed;
  return html`<section>
    <h3>Advantage <b class=${advantage > 0 ? "good" : advantage < 0 ? "bad" : ""}>${digits(advantage)}</b>${credit.file ? "" : html` <span class="muted">(preview)</span>`}</h3>
    <p>${credit.file ? html`<code>${credit.estimator}</code> in <code class="path">${credit.file}</code>.` : html`No experiences were made from this rollout yet; this is what <code>gymdata experience</code> would give with <code>${credit.estimator}</code>.`}
      ${credit.dropped && html` <b>This group was left out: ${credit.dropped}.</b>`}</p>
    <table class="small"><thead><tr><th>rollout</th><th class="num">reward</th><th class="num">advantage</th></tr></thead>
      <tbody>${credit.group.map((one) => html`<tr class=${one.this ? "this" : ""}><td>${one.rollout_index}${one.this ? " (this one)" : ""}</td><td class="num">${digits(one.reward)}</td><td class="num">${digits(one.advantage)}</td></tr>`)}</tbody>
      <tfoot><tr><td>mean, std</td><td class="num" colspan="2">${digits(credit.mean)}, ${digits(credit.std)}</td></tr></tfoot></table>
    <p class="formula"><code>${credit.formula}</code>${credit.by_group && credit.computed != null && credit.std ? html` <code>= (${digits(credit.group.find((one) => one.this)?.reward)} − ${digits(credit.mean)}) / ${digits(credit.std)} = ${digits(credit.computed)}</code>` : ""}</p>
    ${credit.flat && html`<p class="muted">All rewards of the group are equal: there is nothing to learn from comparing them.</p>`}
    ${!credit.same_rewards && html`<p class="muted">The file used the score <code>${credit.score}</code>, not the rewards shown here.</p>`}
    ${Object.keys(credit.settings).length > 0 && html`<p class="muted">After that: ${Object.entries(credit.settings).map(([key, value]) => `${key} = ${JSON.stringify(value)}`).join(", ")}.</p>`}
    ${credit.saved != null && credit.computed != null && Math.abs(credit.saved - credit.computed) > 1e-4 && html`<p class="muted">The file says ${digits(credit.saved)}, the group's rewards alone give ${digits(credit.computed)}.</p>`}
  </section>`;
}

function Why({ about, turn, k, close }) {
  const [data, setData] = useState(null);
  useEffect(() => {
    fetch(`/data/why?${about}&turn=${turn}&k=${k}`).then((answer) => answer.json()).then(setData);
  }, [about, turn, k]);
  if (!data) return html`<p class="muted">…</p>`;
  if (data.error) return html`<div class="problem">${data.error}</div>`;
  const logRatio = data.reference == null || data.logprob == null ? null : data.reference - data.logprob;
  const ratio = logRatio == null ? null : Math.exp(logRatio);
  const advantage = data.credit.saved ?? data.credit.computed;
  return html`<div class="why">
    <header class="whyhead"><div><span class="muted">turn ${data.turn}, token ${data.k + 1} of ${data.of}, id ${data.id}</span><h2>Why is <code class="piece">${data.text.replaceAll("\n", "⏎")}</code> ${data.mask.value ? "trained?" : "not trained?"}</h2></div>
      <button type="button" class="plain" onClick=${close} aria-label="Close" title="Close (Esc)">✕</button></header>
    <section><h3>Loss mask <b>${data.mask.value}</b></h3><p>Because ${data.mask.reason}.${data.mask.source && html` <span class="muted">In <code class="path">${data.mask.source}</code>.</span>`}</p></section>
    <${Credit} credit=${data.credit} />
    <section><h3>Probability</h3>
      <table class="small"><tbody>
        <tr><td>saved when it was sampled</td><td class="num">log ${digits(data.logprob, 6)}</td><td class="num">p ${digits(data.logprob == null ? null : Math.exp(data.logprob))}</td></tr>
        ${data.reference != null && html`<tr><td>recomputed with <code class="path">${data.audited}</code></td><td class="num">log ${digits(data.reference, 6)}</td><td class="num">p ${digits(Math.exp(data.reference))}</td></tr>
        <tr class="this"><td>ratio</td><td class="num">${digits(logRatio, 6)}</td><td class="num">${digits(ratio, 6)}</td></tr>`}
      </tbody></table>
      ${data.reference == null && html`<p class="muted">No audit has this rollout: <code>gymdata audit RUN -m MODEL --write-as ref_logprobs</code> gives another model's probabilities. Until then the ratio is 1, and every loss keeps every token.</p>`}</section>
    <section><h3>Would a loss keep it?</h3>
      ${data.losses.map((loss) => html`<${Loss} key=${loss.name} loss=${loss} advantage=${advantage}
        ratio=${data.reference == null ? 1 : loss.of === "sequence" ? (data.sequence?.mean_log_ratio == null ? null : Math.exp(data.sequence.mean_log_ratio)) : ratio} />`)}</section>
  </div>`;
}

function WhyInPair({ about, text, close }) {
  const [data, setData] = useState(null);
  const [beta, setBeta] = useState(0.1);
  useEffect(() => {
    fetch(`/data/why-in-pair?${new URLSearchParams(about)}`).then((answer) => answer.json()).then(setData);
  }, [about.id, about.side, about.k]);
  if (!data) return html`<p class="muted">…</p>`;
  if (data.error) return html`<div class="problem">${data.error}</div>`;
  const delta = data.difference ?? 0;
  const slope = (data.weight * beta) / (1 + Math.exp(beta * delta));
  const trained = data.mask === 1;
  return html`<div class="why">
    <header class="whyhead"><div><span class="muted">${data.side}, token ${data.k + 1} of ${data.of}, id ${data.id}</span><h2>Why is <code class="piece">${text}</code> ${trained ? "trained?" : "not trained?"}</h2></div>
      <button type="button" class="plain" onClick=${close} aria-label="Close" title="Close (Esc)">✕</button></header>
    <section><h3>Loss mask <b>${data.mask}</b></h3><p>${trained ? "The policy sampled it, so it is in the log-probability of its side." : "The policy did not sample it: it stands between what it sampled, and is context only."}</p>
      ${trained && data.shared && html`<p>Both completions have it after the same text: DPO raises and lowers its probability by the same amount, so its gradients cancel.</p>`}</section>
    <section><h3>Probability when it was sampled</h3><p>log ${digits(data.logprob, 6)}, p ${digits(data.logprob == null ? null : Math.exp(data.logprob))}</p></section>
    <section><h3>DPO</h3><p>The rewards differ by ${digits(data.margin)}; the pair has weight ${digits(data.weight)}.</p>
      <p class="formula"><code>L = −weight · log σ(β · Δ)</code> <code>Δ = log π/ref of chosen − log π/ref of rejected = ${digits(delta)}</code></p>
      <p class="muted">${data.difference == null ? "At the start of a training the policy is the reference, so Δ is 0." : "π as it sampled, ref as the file has it."}</p>
      <label class="slide"><span>β</span><input type="range" aria-label="beta" min="0.01" max="1" step="0.01" value=${beta} onInput=${(e) => setBeta(Number(e.target.value))} /><output>${beta}</output></label>
      ${trained && html`<p>Its log-probability is pushed <b class=${data.side === "chosen" ? "good" : "bad"}>${data.side === "chosen" ? "up" : "down"}</b> with weight · β · σ(−β · Δ) = <b data-slope>${digits(slope)}</b>, as every trained token of this side.</p>`}</section>
  </div>`;
}

function open(drawer, page) {
  const close = () => {
    drawer.hidden = true;
  };
  drawer.hidden = false;
  drawer.scrollTop = 0;
  render(page(close), drawer);
}

export function explainInPair(drawer, about, text) {
  open(drawer, (close) => html`<${WhyInPair} key=${`${about.side}.${about.k}`} about=${about} text=${text} close=${close} />`);
}

export async function explain(drawer, about, turn, k) {
  open(drawer, (close) => html`<${Why} key=${`${turn}.${k}`} about=${about} turn=${turn} k=${k} close=${close} />`);
}
