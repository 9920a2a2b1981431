"use strict";
// All names come from the cluster, so they are inserted as text, never as markup.

const token = new URLSearchParams(location.search).get("token");
const SVG = "http://www.w3.org/2000/svg";
const TABS = [
  ["workers", "Workers"], ["latency", "Latency"], ["passes", "Backward passes"],
  ["contexts", "Contexts"], ["stacks", "Stacks"], ["stuck", "Stuck?"],
];
const state = { tab: "workers", view: null, pass: null, worker: null, bad: false };
const $ = (id) => document.getElementById(id);

function h(tag, attributes, ...children) { return fill(document.createElement(tag), attributes, children); }
function s(tag, attributes, ...children) { return fill(document.createElementNS(SVG, tag), attributes, children); }
function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "onclick") element.addEventListener("click", value);
    else if (name === "background") element.style.background = value;
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined).map(
    (child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  return element;
}
function show(id, ...children) { $(id).replaceChildren(...children); }

function address(path, more) {
  return `/api/${path}?` + new URLSearchParams({ token, ...more });
}
async function ask(path, more) {
  const reply = await fetch(address(path, more), { signal: AbortSignal.timeout(8000) });
  const found = await reply.json();
  if (!reply.ok) throw new Error(found.error);
  return found;
}

// Numbers for people.
function number(value) {
  if (!value) return "0";
  if (value < 9.95) return value.toFixed(1);
  for (const unit of ["", "k", "M", "G"]) {
    if (value < 999.5) return (value < 9.95 ? value.toFixed(1) : value.toFixed(0)) + unit;
    value /= 1000;
  }
  return value.toFixed(0) + "T";
}
function size(value) {
  if (value < 1024) return `${Math.round(value)} B`;
  for (const unit of ["KiB", "MiB", "GiB", "TiB"]) {
    value /= 1024;
    if (value < 1000) return `${value < 9.95 ? value.toFixed(1) : value.toFixed(0)} ${unit}`;
  }
  return `${value.toFixed(0)} PiB`;
}
function duration(seconds) {
  if (!seconds) return "0";
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 100) return `${seconds.toFixed(1)} s`;
  return seconds < 6000 ? `${Math.floor(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}
const clock = (at) => new Date(at * 1000).toLocaleTimeString();

// Tabs.
function open(tab, worker) {
  state.tab = tab;
  if (worker) state.worker = worker;
  for (const [name] of TABS) $(name).hidden = name !== tab;
  drawTabs();
  draw();
  refresh();
}
function drawTabs() {
  show("tabs", ...TABS.map(([name, title]) => h("button",
    { onclick: () => open(name), id: `tab-${name}`, "aria-current": name === state.tab ? "page" : null },
    title, name === "stuck" && state.bad ? h("span", { class: "mark" }, " !") : null)));
}

// Workers.
function drawWorkers(view) {
  const rows = view.workers;
  const sum = (name) => rows.reduce((total, row) => total + row[name], 0);
  const gone = rows.filter((row) => row.state === "lost" || row.state === "silent").length;
  const running = rows.reduce((total, row) => total + row.running.length, 0);
  const tile = (value, what, bad) => h("div", { class: bad ? "tile bad" : "tile" }, h("b", {}, value), h("span", {}, what));
  show("tiles",
    tile(gone ? `${rows.length - gone} of ${rows.length}` : rows.length, gone ? "workers answer" : "workers", gone),
    tile(number(sum("calls_sent")), "calls a second"), tile(size(sum("bytes_sent")), "sent a second"),
    tile(running, "requests running"), tile(sum("gates"), "waiting gates"), tile(view.contexts.length, "live contexts"));
  const titles = ["worker", "calls/s", "", "bytes/s", "", "processor", "", "memory", "gates", "contexts", "references",
    "running"];
  const numeric = new Set([1, 3, 5, 7, 8, 9, 10]);
  show("rows",
    h("thead", {}, h("tr", {}, ...titles.map((title, n) => h("th", { class: numeric.has(n) ? "n" : "" }, title)))),
    h("tbody", {}, ...rows.map(drawRow)));
}
function drawRow(row) {
  const name = h("td", { class: "name" }, h("span", { class: "dot" }),
    h("button", { class: "link", onclick: () => open("stacks", row.name), title: "show its stacks" }, row.name),
    h("small", {}, row.pid ? `${row.host}, process ${row.pid}` : ""));
  const attributes = { class: row.state, "data-worker": row.name };
  if (row.state !== "live") {
    const what = row.since ? `${row.state} since ${clock(row.since)}: ${row.reason}` : "not heard of yet";
    return h("tr", attributes, name, h("td", { colspan: 11 }, what));
  }
  const n = (text) => h("td", { class: "n" }, text);
  const both = (out, come) => h("td", { class: "n both" }, `${out} `, h("small", {}, "out"), h("br"), `${come} `, h("small", {}, "in"));
  const curve = (what) => h("td", { class: "curve" }, spark(row.history.map((point) => point[what])));
  const first = row.running[0];
  const running = first
    ? h("td", {}, `${first.what} `, h("small", {}, `${duration(first.seconds)}, from ${first.peer}`
      + (row.running.length > 1 ? ` and ${row.running.length - 1} more` : "")))
    : h("td", {}, h("small", {}, row.waiting.length ? `waits for ${waitText(row.waiting[0])}` : "idle"));
  return h("tr", attributes, name,
    both(number(row.calls_sent), number(row.calls_served)), curve("calls"),
    both(size(row.bytes_sent), size(row.bytes_received)), curve("bytes"),
    n(`${row.processor.toFixed(0)} %`), curve("processor"), n(size(row.memory)),
    n(row.gates), n(row.contexts), n(row.references), running);
}
function spark(values) {
  const width = 90, height = 22, most = Math.max(...values, 1e-9);
  const last = values.slice(-60);
  const points = last.map((value, n) =>
    `${(width - (last.length - 1 - n) * width / 59).toFixed(1)},${(height - 1 - value / most * (height - 3)).toFixed(1)}`);
  const picture = s("svg", { class: "spark", width, height, "aria-hidden": "true" });
  if (points.length > 1) {
    const left = points[0].split(",")[0];
    picture.append(s("path", { class: "area", d: `M${left},${height} L${points.join(" L")} L${width},${height} Z` }),
      s("path", { d: `M${points.join(" L")}` }));
  }
  return picture;
}
function drawMatrix(view) {
  const names = view.workers.map((row) => row.name);
  const found = new Map(view.traffic.map((each) => [`${each.sender}\n${each.receiver}`, each]));
  const most = Math.max(...view.traffic.map((each) => each.bytes), 1);
  show("matrix",
    h("tr", {}, h("th", {}), ...names.map((name) => h("th", { class: "n" }, name))),
    ...names.map((sender) => h("tr", {}, h("th", {}, sender), ...names.map((receiver) => {
      const each = found.get(`${sender}\n${receiver}`);
      if (!each) return h("td", {});
      if (!each.bytes && !each.calls) return h("td", { class: "zero" }, "0");
      const share = Math.sqrt(each.bytes / most);
      return h("td", { background: `rgb(var(--shade) / ${(share * 55).toFixed(0)}%)`, "data-bytes": each.bytes.toFixed(0) },
        size(each.bytes), h("small", {}, `${number(each.calls)} calls`));
    }))));
}

// Latency.
function drawCurves(view) {
  const curves = Object.entries(view.curves).map(([name, points]) => ({ name, points }))
    .filter((each) => each.points.length > 1)
    .sort((a, b) => b.points[b.points.length - 1].calls - a.points[a.points.length - 1].calls).slice(0, 12);
  if (!curves.length) return show("curves", h("p", { class: "empty" }, "No call yet since the dashboard was opened."));
  show("curves", ...curves.map((each) => drawCurve(each, view.now)));
}
function drawCurve({ name, points }, now) {
  const width = 420, height = 150, left = 54, bottom = 20;
  const span = Math.min(240, Math.max(60, now - points[0].at));
  const most = Math.max(...points.map((point) => point.p99)) * 1.1 || 1;
  const x = (at) => left + (1 - (now - at) / span) * (width - left - 8);
  const y = (value) => 8 + (1 - value / most) * (height - bottom - 8);
  const shown = points.filter((point) => now - point.at <= span);
  const line = (what) => s("path", { class: what,
    d: "M" + shown.map((point) => `${x(point.at).toFixed(1)},${y(point[what]).toFixed(1)}`).join(" L") });
  const picture = s("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img", "aria-label": `latency of ${name}` });
  for (const part of [0, 0.5, 1]) {
    picture.append(s("line", { class: "grid", x1: left, x2: width - 8, y1: y(most * part), y2: y(most * part) }),
      s("text", { class: "soft", x: left - 6, y: y(most * part) + 4, "text-anchor": "end" }, duration(most * part)));
  }
  for (const ago of [1, 0.67, 0.33, 0].map((part) => Math.round(span * part))) {
    picture.append(s("text", { class: "soft", x: x(now - ago), y: height - 4,
      "text-anchor": ago === 0 ? "end" : ago > span * 0.9 ? "start" : "middle" }, ago ? `${ago} s ago` : "now"));
  }
  if (shown.length > 1) picture.append(line("p99"), line("p50"));
  const last = points[points.length - 1];
  return h("div", { class: "card chart", "data-function": name }, h("h2", {}, name, " ", h("small", {},
    `${number(last.calls)} calls/s, half below ${duration(last.p50)}, 99 % below ${duration(last.p99)}`)), picture);
}

// Passes.
function drawPasses(view) {
  const passes = view.passes;
  if (!passes.length) {
    $("pass-title").textContent = "No backward pass yet since the dashboard was opened";
    return show("pass-list");
  }
  const chosen = passes.find((one) => one.backward === state.pass) || passes.find((one) => one.complete) || passes[0];
  show("pass-list", ...passes.map((one) => h("button",
    { onclick: () => { state.pass = one.backward; draw(); }, "aria-pressed": one === chosen && state.pass ? "true" : "false",
      class: one.failed ? "failed" : "" },
    `${clock(one.began)}  `, h("b", {}, one.ended ? duration(one.ended - one.began) : "goes on"), one.failed ? " failed" : "")),
    h("button", { onclick: () => { state.pass = null; draw(); }, "aria-pressed": state.pass ? "false" : "true" }, "always the latest"));
  $("pass-title").textContent = `Backward pass ${chosen.backward} of context ${chosen.context}`
    + (chosen.starter ? `, started by ${chosen.starter}` : "")
    + `: ${chosen.ended ? duration(chosen.ended - chosen.began) : "goes on since " + duration(view.now - chosen.began)}`;
  show("timeline", drawTimeline(chosen, view));
}
function drawTimeline(one, view) {
  const order = new Map(view.workers.map((row, n) => [row.name, n]));
  const shares = [...one.shares].sort((a, b) => order.get(a.worker) - order.get(b.worker));
  const end = one.ended || view.now;
  const ends = shares.flatMap((share) => [...share.runs, ...share.gates, ...share.waits].map((part) => part.ended || end));
  const last = Math.max(end, ...ends), whole = Math.max(last - one.began, 1e-6);
  const left = 130, width = 1240, high = 20;
  const x = (at) => left + (at - one.began) / whole * (width - left - 14);
  let top = 26;
  const picture = s("svg", { width, role: "img", "aria-label": "timeline of a backward pass" });
  const below = s("g"), above = s("g");
  for (const share of shares) {
    // Runs of several threads overlap, so each thread has its own line.
    const threads = [...new Set(share.runs.map((run) => run.thread))];
    const lanes = Math.max(threads.length, 1);
    below.append(s("rect", { class: "lane", x: left, y: top, width: width - left - 14, height: lanes * (high + 2) + 4, rx: 4 }),
      s("text", { x: left - 10, y: top + 16, "text-anchor": "end" }, share.worker));
    const bar = (part, kind, lane, inset) => above.append(s("rect",
      { class: kind, x: x(part.began).toFixed(2), y: top + 3 + lane * (high + 2) + inset, rx: 2,
        width: Math.max(x(part.ended || last) - x(part.began), 1).toFixed(2), height: high - 2 * inset },
      s("title", {}, `${kind} on ${share.worker}: ${duration((part.ended || last) - part.began)}`
        + `, from ${duration(part.began - one.began)} on` + (kind === "run" ? `, ${part.sources} tensors` : ""))));
    share.waits.forEach((part) => bar(part, "wait", 0, 0));
    share.runs.forEach((part) => bar(part, "run", threads.indexOf(part.thread), 0));
    share.gates.forEach((part) => {
      const around = share.runs.find((run) => run.began <= part.began && (run.ended || last) >= (part.ended || last));
      bar(part, "gate", around ? threads.indexOf(around.thread) : 0, 4);
    });
    top += lanes * (high + 2) + 12;
  }
  for (let part = 0; part <= 4; part++) {
    const at = one.began + whole * part / 4;
    below.append(s("line", { class: "grid", x1: x(at), x2: x(at), y1: 20, y2: top }),
      s("text", { class: "soft", x: x(at), y: 14, "text-anchor": part === 4 ? "end" : part ? "middle" : "start" },
        duration(whole * part / 4)));
  }
  picture.setAttribute("height", top + 4);
  picture.append(below, above);
  return picture;
}

// Contexts.
function drawContexts(view) {
  if (!view.contexts.length) return show("context-list", h("tr", {}, h("td", { class: "empty" }, "No context is open just now.")));
  show("context-list",
    h("tr", {}, ...["context", "made by", "workers", "recorded tensors", "passes", ""].map((title) => h("th", {}, title))),
    ...view.contexts.slice(0, 50).map((each) => h("tr", {}, h("td", {}, each.context), h("td", {}, each.initiator),
      h("td", {}, each.workers.join(", ")), h("td", {}, each.tensors), h("td", {}, each.passes),
      h("td", { class: "n" }, h("button", { onclick: () => drawContext(each.context) }, "draw")))));
}
function drawContext(id) {
  const src = address("drawing", { context: id, at: Date.now() });
  const picture = h("img", { alt: `drawing of context ${id}`, id: "picture" });
  picture.addEventListener("load", () => {
    $("drawing-title").textContent = id === "latest" ? "The latest context" : `Context ${id}`;
    show("drawing", picture);
    $("drawing-card").hidden = false;
  });
  picture.addEventListener("error", async () => {
    let why = "the picture cannot be shown";
    try { await ask("drawing", { context: id }); } catch (error) { why = error.message; }
    $("drawing-title").textContent = id === "latest" ? "The latest context" : `Context ${id}`;
    show("drawing", h("p", { class: "empty" }, why));
    $("drawing-card").hidden = false;
  });
  picture.src = src;
}

// Stacks.
function waitText(wait) {
  switch (wait.kind) {
    case "reply": return `${wait.what} on ${wait.peer}`;
    case "gate": return `gradients from ${wait.peer}, at a gate`;
    case "pass": return wait.ranks.length ? `backward on ranks ${wait.ranks.join(", ")}` : "backward to end";
    case "value": return `the value ${wait.ref}`;
    case "connection": return `a connection to ${wait.peer}`;
    case "room": return `${wait.peer} to take ${size(wait.bytes)}`;
  }
  return wait.what || wait.kind;
}
async function drawStacks() {
  const names = state.view ? state.view.workers.map((row) => row.name) : [];
  if (!state.worker && names.length) state.worker = names[0];
  const worker = state.worker;
  show("stack-workers", ...names.map((name) => h("button",
    { onclick: () => open("stacks", name), "aria-pressed": name === worker ? "true" : "false" }, name)));
  if (!worker) return;
  let parts;
  try {
    const found = await ask("threads", { worker });
    const busy = found.threads.filter((thread) => isBusy(thread));
    const idle = found.threads.filter((thread) => !isBusy(thread));
    parts = [...busy.map(drawThread), h("details", {}, h("summary", {}, `${idle.length} idle threads`),
      ...idle.map(drawThread))];
    const before = $("threads").querySelector("details");
    if (before && before.open && worker === state.shown) parts[parts.length - 1].open = true;
  } catch (error) {
    parts = [h("p", { class: "empty" }, `${worker}: ${error.message}`)];
  }
  if (worker === state.worker && state.tab === "stacks") { state.shown = worker; show("threads", ...parts); }
}
const isBusy = (thread) => thread.handles.length || thread.waits.length
  || (thread.stack || []).some((frame) => frame.whose === "user");
function relevant(stack) {
  // Frames above the user's first line only start the thread.
  const first = stack.findIndex((frame) => frame.whose === "user");
  return first < 0 ? stack.slice(-4) : stack.slice(first);
}
function drawThread(thread) {
  const does = h("p", { class: "does" });
  thread.handles.forEach((each) => does.append(h("span", { class: "handles" }, `handles ${each.what} for ${each.peer}`), ` ${duration(each.seconds)}  `));
  thread.waits.forEach((each) => does.append(h("span", { class: "waits" }, `waits for ${waitText(each)}`), ` ${duration(each.seconds)}  `));
  if (thread.blocked && !thread.waits.length) does.append(h("span", { class: "blocked" }, `stands at ${thread.blocked.on} ${thread.blocked.what || ""}`));
  const frames = relevant(thread.stack || []).reverse().map((frame) => h("li", { class: frame.whose === "user" ? "user" : "" },
    frame.function, h("span", { class: "place" }, `  ${frame.file}:${frame.line}  `), frame.code || ""));
  return h("div", { class: "card thread" }, h("h3", {}, thread.name), does.childNodes.length ? does : null, h("ul", { class: "frames" }, ...frames));
}

// Stuck?
async function drawStuck() {
  let found;
  try { found = await ask("stuck"); } catch (error) { return show("stuck-text", h("p", { class: "empty" }, error.message)); }
  noteStuck(found);
  show("stuck-text",
    ...Object.entries(found.silent).map(([worker, why]) => h("p", { class: "chain lost" }, h("b", {}, "lost"), `${worker}: ${why}`)),
    ...found.lasting.map((chain) => h("p", { class: `chain ${chain.end}` }, h("b", {}, chain.end),
      chain.sentence, h("small", { class: "hint" }, `  ${duration(chain.seconds)}`))),
    found.remark ? h("p", { class: "hint" }, found.remark) : null);
  const keep = new Set(found.lasting.flatMap((chain) => chain.nodes));
  show("stuck-graph", drawGraph(found.nodes.filter((node) => keep.has(node.id)), found.edges, found.lasting));
}
function noteStuck(found) {
  const bad = Object.keys(found.silent).length > 0 || found.chains.some((chain) => chain.end === "cycle" || chain.end === "lost");
  if (bad !== state.bad) { state.bad = bad; drawTabs(); }
}
function drawGraph(nodes, edges, chains) {
  if (!nodes.length) return h("p", { class: "empty" }, "Nothing has been waiting for long.");
  const at = new Map(nodes.map((node) => [node.id, node]));
  const links = edges.filter((edge) => at.has(edge.source) && at.has(edge.target));
  const inCycle = new Set();
  for (const chain of chains.filter((each) => each.end === "cycle")) {
    const closing = chain.nodes.indexOf(chain.nodes[chain.nodes.length - 1]);
    for (let n = closing; n + 1 < chain.nodes.length; n++) inCycle.add(`${chain.nodes[n]}\n${chain.nodes[n + 1]}`);
  }
  // Columns: as far as possible from a thread that nobody waits for; cycles begin anywhere.
  const depth = new Map();
  const visit = (id, level, path) => {
    if (path.has(id) || (depth.get(id) ?? -1) >= level) return;
    depth.set(id, level);
    const further = new Set(path).add(id);
    links.filter((edge) => edge.source === id).forEach((edge) => visit(edge.target, level + 1, further));
  };
  const awaited = new Set(links.filter((edge) => edge.source !== edge.target).map((edge) => edge.target));
  nodes.filter((node) => !awaited.has(node.id)).forEach((node) => visit(node.id, 0, new Set()));
  nodes.forEach((node) => { if (!depth.has(node.id)) visit(node.id, 0, new Set()); });
  const wide = 250, high = 84, gap = 70, row = 26, filled = [];
  const place = new Map();
  for (const node of nodes) {
    const column = depth.get(node.id);
    filled[column] = (filled[column] || 0) + 1;
    place.set(node.id, { x: 4 + column * (wide + gap), y: 8 + (filled[column] - 1) * (high + row) });
  }
  const bottom = 8 + Math.max(...filled.map((count) => count || 0)) * (high + row);
  const picture = s("svg", { width: filled.length * (wide + gap), height: bottom + 40, role: "img", "aria-label": "what waits for what" });
  for (const name of ["", "bad"]) {
    picture.append(s("defs", {}, s("marker", { id: `head${name}`, viewBox: "0 0 10 10", refX: 9, refY: 5, markerWidth: 7,
      markerHeight: 7, orient: "auto-start-reverse" }, s("path", { class: `head ${name}`, d: "M0,0 L10,5 L0,10 Z" }))));
  }
  for (const edge of links) {
    const a = place.get(edge.source), b = place.get(edge.target);
    const bad = inCycle.has(`${edge.source}\n${edge.target}`) ? "bad" : "";
    const x1 = a.x + wide, y1 = a.y + high / 2, y2 = b.y + high / 2;
    const d = b.x > a.x
      ? `M${x1},${y1} C${x1 + gap / 2},${y1} ${b.x - gap / 2},${y2} ${b.x},${y2}`
      : `M${a.x + wide / 2},${a.y + high} C${a.x + wide / 2},${bottom + 30} ${b.x + wide / 2},${bottom + 30} ${b.x + wide / 2},${b.y + high}`;
    picture.append(s("path", { class: `edge ${bad}`, d, "marker-end": `url(#head${bad})` }, s("title", {}, edge.what)));
  }
  for (const node of nodes) {
    const { x, y } = place.get(node.id);
    const bad = [...inCycle].some((pair) => pair.startsWith(`${node.id}\n`)) || node.kind === "lost";
    const group = s("g", { class: `node ${bad ? "bad" : ""} ${node.kind === "thread" ? "" : "end"}` },
      s("rect", { x, y, width: wide, height: high, rx: 8 }), s("title", {}, `${node.does}\n${node.at}`));
    const title = node.kind === "thread" ? `${node.worker}, ${node.title}` : `${node.title}${node.worker ? ": " + node.worker : ""}`;
    group.append(s("text", { class: "title", x: x + 12, y: y + 22 }, cut(title, 32)));
    wrap(node.does, 38, 3).forEach((text, n) => group.append(s("text", { class: "soft", x: x + 12, y: y + 40 + n * 16 }, text)));
    picture.append(group);
  }
  return picture;
}
const cut = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);
function wrap(text, most, lines) {
  const found = [];
  let line = "";
  for (const word of text.split(" ")) {
    if (line && (line + " " + word).length > most) { found.push(line); line = word; } else line = line ? `${line} ${word}` : word;
  }
  found.push(line);
  if (found.length > lines) { found.length = lines; found[lines - 1] += " …"; }
  return found.map((each) => cut(each, most + 2));
}

// Polling.
function draw() {
  const view = state.view;
  if (!view) return;
  if (state.tab === "workers") { drawWorkers(view); drawMatrix(view); }
  if (state.tab === "latency") drawCurves(view);
  if (state.tab === "passes") drawPasses(view);
  if (state.tab === "contexts") drawContexts(view);
}
async function refresh() {
  if (state.tab === "stacks") await drawStacks();
  if (state.tab === "stuck") await drawStuck();
}
async function look() {
  try {
    state.view = await ask("view");
    $("banner").hidden = true;
    $("pulse").textContent = clock(state.view.now);
    draw();
  } catch (error) {
    $("banner").hidden = false;
    $("banner").textContent = `The dashboard does not answer: ${error.message}`;
  }
  setTimeout(look, 1000);
}
async function watch(turn) {
  await refresh();
  if (turn % 3 === 0 && state.tab !== "stuck") ask("stuck").then(noteStuck, () => {});
  setTimeout(() => watch(turn + 1), 2000);
}
$("draw-latest").addEventListener("click", () => drawContext("latest"));
drawTabs();
look();
watch(0);
