"use strict";
// Values under the pointer, folded parts in print, and, on the live page, a fresh fragment every two seconds.
const nearest = (data, step) => {
  let low = 0, high = data.length / 2 - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (data[2 * middle] < step) low = middle + 1; else high = middle;
  }
  return low && step - data[2 * low - 2] < data[2 * low] - step ? low - 1 : low;
};
const point = (event) => {
  const svg = event.target.closest && event.target.closest("svg[data-lines]");
  if (!svg) return;
  svg.lines = svg.lines || JSON.parse(svg.dataset.lines);
  const [left, top, width, height, first, last] = svg.dataset.box.split(" ").map(Number);
  const frame = svg.getBoundingClientRect();
  const x = (event.clientX - frame.left) * svg.viewBox.baseVal.width / frame.width;
  const wanted = first + (last - first) * Math.min(1, Math.max(0, (x - left) / width));
  const hits = svg.lines.map(([name, , data]) => [name, data, nearest(data, wanted)]);
  const steps = hits.map(([, data, at]) => data[2 * at]);
  const step = steps.reduce((a, b) => Math.abs(a - wanted) <= Math.abs(b - wanted) ? a : b);
  const at = left + (last > first ? width * (step - first) / (last - first) : width / 2);
  svg.querySelector(".at").setAttribute("d", `M${at.toFixed(1)},${top}v${height}`);
  const said = hits.map(([name, data, i]) => `${name} ${data[2 * i + 1]}` + (data[2 * i] === step ? "" : ` (step ${data[2 * i]})`));
  const shown = svg.parentElement.querySelector("output");
  if (svg.words === undefined) svg.words = shown.textContent;
  shown.textContent = `step ${step.toLocaleString("en")}: ${said.join(", ")}`;
};
const leave = (event) => {
  const svg = event.target.closest && event.target.closest("svg[data-lines]");
  if (!svg || svg.contains(event.relatedTarget)) return;
  svg.querySelector(".at").setAttribute("d", "");
  if (svg.words !== undefined) svg.parentElement.querySelector("output").textContent = svg.words;
};
document.addEventListener("pointermove", point);
document.addEventListener("pointerdown", point);
document.addEventListener("pointerout", leave);
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => { part.open = true; }));

const live = document.querySelector("main[data-live]");
const said = document.getElementById("live");
const folds = () => [...live.querySelectorAll("details")];
const refresh = async () => {
  try {
    const answer = await fetch(live.dataset.live, {cache: "no-store"});
    if (!answer.ok) throw new Error(answer.status);
    const text = await answer.text();
    if (text !== live.shown) {
      const open = folds().map((part) => part.open);
      live.shown = text;
      live.innerHTML = text;
      if (open.length === folds().length) folds().forEach((part, at) => { part.open = open[at]; });
    }
    said.textContent = `up to date at ${new Date().toLocaleTimeString()}`;
  } catch (error) {
    said.textContent = "petune watch does not answer any more: this is what it said last";
  }
};
if (live) setInterval(() => { if (!document.hidden) refresh(); }, 2000);
