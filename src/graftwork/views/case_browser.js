"use strict";
// The cases of an evaluation, one screen at a time. Reads the JSON of the page; puts text in as text only.
const ORDER = ["lost", "won", "wrong", "right", "open"];
const WORDS = {
  lost: "lost", won: "won", wrong: "both wrong", right: "both right", open: "not graded",
};
const MOST_CELLS = 400000;
const SCREEN = 20;

// How one case went from the left subject to the right one; metric -1 stands for all of them together.
function judge(data, item, metric, left, right) {
  let chosen = metric >= 0 ? [metric] : data.metrics.map((_, i) => i);
  if (metric < 0 && data.metrics.some((one) => one.rate)) chosen = chosen.filter((i) => data.metrics[i].rate);
  let wins = 0, losses = 0, graded = 0, wrong = 0;
  for (const i of chosen) {
    const before = item.scores[i][left], after = item.scores[i][right];
    if (before === null || after === null) continue;
    const change = data.metrics[i].less ? before - after : after - before;
    const best = data.metrics[i].less ? 0 : 1;
    graded += 1;
    if (change > 0) wins += 1;
    else if (change < 0) losses += 1;
    else if (after !== best) wrong += 1;
  }
  const outcome = !graded ? "open" : losses ? "lost" : wins ? "won" : wrong ? "wrong" : "right";
  return { outcome, weight: losses || wins || wrong };
}

// The cases that pass every filter, those that got worse first.
function choose(data, filter) {
  const needle = filter.search.trim().toLowerCase();
  const counts = {};
  const found = [];
  data.cases.forEach((item, place) => {
    if (filter.cut && item.parts[filter.cut] !== filter.part) return;
    if (needle && !textOf(item).includes(needle)) return;
    const seen = judge(data, item, filter.metric, filter.left, filter.right);
    counts[seen.outcome] = (counts[seen.outcome] || 0) + 1;
    if (filter.outcome && seen.outcome !== filter.outcome) return;
    found.push({ item, place, ...seen });
  });
  found.sort((a, b) =>
    ORDER.indexOf(a.outcome) - ORDER.indexOf(b.outcome) || b.weight - a.weight || a.place - b.place);
  return { found, counts };
}

function textOf(item) {
  const texts = item.answers.map((answer) => (answer ? answer.text : ""));
  return [item.id, item.from, ...item.turns.map((turn) => turn[1]), item.reference, ...texts]
    .join("\n").toLowerCase();
}

// Both texts in pieces [text, differs]: what stands in one only is marked.
function compareTexts(before, after) {
  const a = before.match(/[\p{L}\p{N}_]+|\s+|[^\p{L}\p{N}_\s]/gu) || [];
  const b = after.match(/[\p{L}\p{N}_]+|\s+|[^\p{L}\p{N}_\s]/gu) || [];
  let start = 0, tail = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  while (tail < a.length - start && tail < b.length - start
    && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail += 1;
  const rows = a.length - start - tail, columns = b.length - start - tail;
  const keepA = new Array(a.length).fill(true), keepB = new Array(b.length).fill(true);
  keepA.fill(false, start, start + rows);
  keepB.fill(false, start, start + columns);
  // Beyond this the middle is marked whole: comparing takes longer than it helps.
  if (rows * columns <= MOST_CELLS) {
    const width = columns + 1;
    const longest = new Uint16Array((rows + 1) * width);
    for (let i = rows - 1; i >= 0; i -= 1) {
      for (let j = columns - 1; j >= 0; j -= 1) {
        longest[i * width + j] = a[start + i] === b[start + j]
          ? longest[(i + 1) * width + j + 1] + 1
          : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
      }
    }
    for (let i = 0, j = 0; i < rows && j < columns;) {
      if (a[start + i] === b[start + j]) {
        keepA[start + i] = keepB[start + j] = true;
        i += 1; j += 1;
      } else if (longest[(i + 1) * width + j] >= longest[i * width + j + 1]) i += 1;
      else j += 1;
    }
  }
  return [join(a, keepA), join(b, keepB)];
}

function join(pieces, kept) {
  const joined = [];
  pieces.forEach((piece, i) => {
    // White space alone is no difference worth a mark.
    const differs = !kept[i] && piece.trim() !== "";
    const last = joined[joined.length - 1];
    if (last && (last[1] === differs || piece.trim() === "")) last[0] += piece;
    else joined.push([piece, differs]);
  });
  return joined;
}

function make(tag, text, kind) {
  const node = document.createElement(tag);
  if (text !== undefined && text !== null) node.textContent = text;
  if (kind) node.className = kind;
  return node;
}

function drawText(pieces) {
  const box = make("pre");
  for (const [text, differs] of pieces) box.append(differs ? make("mark", text) : text);
  return box;
}

function drawAnswer(name, answer, pieces, kind) {
  const box = make("div", null, "answer " + kind);
  const head = make("h4");
  head.append(make("span", null, "key " + kind), name);
  if (answer && answer.cut) head.append(make("span", "cut off", "chip warning"));
  if (answer && answer.of) head.append(make("span", "first of " + answer.of, "chip"));
  box.append(head, answer ? drawText(pieces) : make("p", "no answer", "soft"));
  return box;
}

function drawGrades(data, item, left, right) {
  const row = make("p", null, "grades");
  data.metrics.forEach((metric, i) => {
    const before = item.scores[i][left], after = item.scores[i][right];
    if (before === null && after === null) return;
    const better = metric.less ? after < before : after > before;
    const tone = before === null || after === null || before === after ? "" : better ? "pass" : "fail";
    row.append(make("span", metric.label + " " + grade(metric, before) + " → " + grade(metric, after),
      "chip " + tone));
  });
  return row;
}

function grade(metric, value) {
  if (value === null) return "–";
  if (metric.rate && (value === 0 || value === 1)) return (value === 1) !== metric.less ? "✓" : "✕";
  return String(Math.round(100 * value) / 100);
}

function drawCase(data, seen, filter) {
  const item = seen.item;
  const card = make("article", null, "pair case");
  const head = make("p", null, "case-head");
  const tones = { lost: "fail", won: "pass", wrong: "warning" };
  head.append(make("span", WORDS[seen.outcome], "chip " + (tones[seen.outcome] || "")));
  for (const cut of Object.keys(item.parts)) head.append(make("span", item.parts[cut], "chip"));
  head.append(make("span", item.id + " · " + item.from, "soft"));
  const last = item.turns.length ? item.turns[item.turns.length - 1][1] : "";
  card.append(head, make("h3", last.length > 500 ? last.slice(0, 500) + " …" : last, "asked"));
  if (item.turns.length > 1 || last.length > 500) {
    const whole = make("details");
    whole.append(make("summary", "the whole prompt, " + item.turns.length
      + (item.turns.length === 1 ? " turn" : " turns")));
    whole.addEventListener("toggle", () => {
      if (whole.childElementCount > 1) return;
      for (const [role, text] of item.turns) whole.append(make("h4", role), make("pre", text));
    });
    card.append(whole);
  }
  const left = item.answers[filter.left], right = item.answers[filter.right];
  const [before, after] = compareTexts(left ? left.text : "", right ? right.text : "");
  const columns = make("div", null, "columns");
  columns.append(drawAnswer(data.subjects[filter.left], left, before, "before"),
    drawAnswer(data.subjects[filter.right], right, after, "after"));
  if (item.reference) {
    const box = make("div", null, "answer");
    box.append(make("h4", "Logged reply"), make("pre", item.reference));
    columns.append(box);
  }
  card.append(columns, drawGrades(data, item, filter.left, filter.right));
  return card;
}

function option(parent, value, text) {
  const node = make("option", text);
  node.value = value;
  parent.append(node);
}

function begin() {
  const data = JSON.parse(document.getElementById("case-data").textContent);
  const at = (name) => document.getElementById("case-" + name);
  const list = at("list"), more = at("more"), count = at("count");
  data.subjects.forEach((name, i) => { option(at("left"), i, name); option(at("right"), i, name); });
  at("left").value = data.subjects.indexOf(data.left);
  at("right").value = data.subjects.indexOf(data.right);
  option(at("metric"), -1, "any metric");
  data.metrics.forEach((metric, i) => option(at("metric"), i, metric.label));
  option(at("outcome"), "", "all");
  ORDER.forEach((outcome) => option(at("outcome"), outcome, WORDS[outcome]));
  option(at("part"), "", "all cases");
  for (const cut of Object.keys(data.cuts)) {
    data.cuts[cut].forEach((part, i) => option(at("part"), cut + "/" + i, cut + ": " + part));
  }
  let rest = [], filter = null;
  const show = () => {
    const next = rest.splice(0, SCREEN);
    list.append(...next.map((seen) => drawCase(data, seen, filter)));
    more.hidden = rest.length === 0;
    more.textContent = "Show " + Math.min(SCREEN, rest.length) + " more of " + rest.length;
  };
  const renew = () => {
    const [cut, number] = at("part").value.split("/");
    filter = {
      left: Number(at("left").value), right: Number(at("right").value), metric: Number(at("metric").value),
      outcome: at("outcome").value, search: at("search").value, cut, part: cut && data.cuts[cut][number],
    };
    const { found, counts } = choose(data, filter);
    count.textContent = found.length + " of " + data.cases.length + " cases. "
      + ORDER.filter((outcome) => counts[outcome])
        .map((outcome) => counts[outcome] + " " + WORDS[outcome]).join(", ") + ".";
    rest = found;
    list.replaceChildren();
    show();
  };
  for (const name of ["left", "right", "metric", "outcome", "part"]) at(name).addEventListener("change", renew);
  at("search").addEventListener("input", renew);
  more.addEventListener("click", show);
  renew();
}

if (typeof document !== "undefined") begin();
if (typeof module !== "undefined") module.exports = { judge, choose, compareTexts };
