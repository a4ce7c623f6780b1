
"use strict";
// Text from the data enters the page as text nodes and attributes alone, never as markup.
// Used by the written page, whose frames are all there, and by the server's, whose frames are appended one by one.
const player = (() => {
  const byId = (id) => document.getElementById(id);
  const isMasked = (token) => token.state === "hidden" || token.state === "remasked";

  function element(tag, className, ...children) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    node.append(...children);
    return node;
  }

  // --- The data: every frame in full; a token that did not change is the same object. ---

  function decodeFrames(trajectory, states) {
    let tokens = [];
    return trajectory.frames.map(([step, nfe, flat]) => {
      tokens = tokens.slice();
      for (let i = 0, at = -1; i < flat.length; ) {
        at += flat[i++];
        const kind = flat[i++];
        const text = trajectory.strings[flat[i++]];
        const guesses = [];
        for (let left = flat[i++]; left > 0; left--) guesses.push([trajectory.strings[flat[i++]], flat[i++] / 1000]);
        tokens[at] = { state: states[kind >> 1], isAnchor: kind % 2 === 1, text, guesses };
      }
      return { step, nfe, tokens };
    });
  }

  // What happened to one position: [index of the frame, words], a line for each change.
  function history(frames, place) {
    const events = [];
    let before = null;
    frames.forEach((frame, index) => {
      const token = frame.tokens[place];
      if (token === before) return;
      const label =
        token.state === "revealed" ? `revealed as ${quoted(token.text)}`
        : token.state === "remasked" ? "remasked"
        : before && isMasked(token) === isMasked(before) && token.text === before.text ? null
        : isMasked(token) ? "hidden"
        : token.state === "given" ? `given: ${quoted(token.text)}`
        : `reads ${quoted(token.text)}`;
      if (label) events.push([index, label]);
      before = token;
    });
    return events;
  }

  // Whitespace made visible, and a token that adds nothing of its own.
  const plain = (text) => text.replace(/ /g, "␣").replace(/\n/g, "↵").replace(/\t/g, "⇥") || "∅";
  const quoted = (text) => `“${plain(text)}”`;

  // Space around a token's letters is laid out but not colored.
  function pieces(text) {
    const [, lead, ink, tail] = /^(\s*)([^]*?)(\s*)$/.exec(text);
    if (ink) return [lead, ink, tail];
    return text.includes("\n") ? ["", "", text] : ["", text, ""];
  }

  // --- One panel for each trajectory. ---

  const GUESS_SIZE = 0.92; // of the text's, as in the style
  const UNKNOWN = [" ", "\u2003\u2003", ""]; // the place of a token that has not been seen yet
  const brush = document.createElement("canvas").getContext("2d");
  const family = getComputedStyle(document.documentElement).getPropertyValue("--serif");
  const widths = new Map();
  function width(text, style) {
    const key = `${style} ${text}`;
    if (!widths.has(key)) {
      brush.font = `${style} 100px ${family}`;
      widths.set(key, brush.measureText(text).width);
    }
    return widths.get(key);
  }

  // A panel without frames: title, guesser, settings (pairs of strings) and seconds are the trajectory's.
  function makePanel(trajectory, place) {
    const text = element("div", "text");
    text.translate = false;
    const title = element("h2");
    const [step, nfe, seen] = ["step", "nfe", "seen"].map((name) => element("b", name));
    const [total, length, time] = ["total", "length", "time"].map((name) => element("span", name));
    const share = element("i");
    const counts = element(
      "div", "counts",
      element("span", "", "step ", step, total),
      element("span", "", element("abbr", "", "NFE"), " ", nfe),
      element("span", "", seen, length, " visible"),
      time,
    );
    counts.querySelector("abbr").title = "network evaluations so far";
    const details = element("details");
    const head = element("div", "head", title, counts);
    const panel = element("section", "panel", head, element("div", "share", share), text, details);
    const parts = { panel, title, text, details, step, total, nfe, seen, length, time, share };
    const view = { trajectory, place, frames: [], tokens: [], index: -1, shown: [], ...parts };
    text.addEventListener("mouseover", (event) => point(view, event.target.closest(".token")));
    text.addEventListener("mouseleave", () => point(null, null));
    text.addEventListener("focusin", (event) => focus(view, event.target.closest(".token")));
    text.addEventListener("focusout", () => focus(null, null));
    nameParts(view);
    return view;
  }

  function makeTokens(panel, count) {
    panel.tokens = Array.from({ length: count }, (_, place) => {
      const parts = ["gap", "ink", "gap"].map((name) => element("span", name));
      const token = element("span", "token", ...parts);
      token.tabIndex = place === 0 ? 0 : -1;
      token.dataset.place = place;
      return { token, parts, ghost: UNKNOWN };
    });
    panel.text.append(...panel.tokens.map((each) => each.token));
    panel.length.textContent = ` of ${count}`;
  }

  function nameParts(panel) {
    const { trajectory, frames } = panel;
    panel.title.textContent = trajectory.title;
    panel.panel.setAttribute("aria-label", `${panel.place + 1}: ${trajectory.title}`);
    if (frames.length) panel.details.replaceChildren(...settings(trajectory, frames[frames.length - 1]));
  }

  function settings(trajectory, last) {
    const list = element("dl");
    const rows = [...trajectory.settings, ["network evaluations", String(last.nfe)]];
    if (trajectory.seconds > 0) rows.push(["seconds", String(trajectory.seconds)]);
    for (const [name, value] of rows) list.append(element("dt", "", name), element("dd", "", value));
    return [element("summary", "", "Settings"), list];
  }

  function draw(panel, index) {
    const frame = panel.frames[index];
    frame.tokens.forEach((token, place) => {
      if (panel.shown[place] !== token) drawToken(panel.tokens[place], token);
    });
    panel.shown = frame.tokens;
    panel.index = index;
    const visible = frame.tokens.filter((token) => !isMasked(token)).length;
    panel.step.textContent = frame.step;
    panel.time.textContent = frame.seconds === undefined ? "" : `${frame.seconds.toFixed(2)} s`;
    panel.nfe.textContent = frame.nfe;
    panel.seen.textContent = visible;
    panel.share.style.transform = `scaleX(${frame.tokens.length ? visible / frame.tokens.length : 1})`;
  }

  function drawToken({ token, parts, ghost }, now) {
    const hidden = isMasked(now);
    const ink = parts[1];
    token.dataset.state = now.state;
    token.classList.toggle("anchor", now.isAnchor);
    pieces(now.text).forEach((piece, i) => {
      if (parts[i].textContent !== piece) parts[i].textContent = piece;
      if (hidden) parts[i].dataset.ghost = ghost[i];
      else delete parts[i].dataset.ghost;
    });
    const [guess, p] = hidden && now.guesses.length ? now.guesses[0] : ["", 0];
    ink.style.setProperty("--p", p);
    const word = guess.trim() || (guess && plain(guess));
    // A guess longer than its place is set narrower; one that could not be read then is left to the card.
    const squeeze = word ? width(ghost[1], "normal") / (GUESS_SIZE * width(word, "italic")) : 0;
    ink.style.setProperty("--squeeze", Math.min(1, squeeze || 1).toFixed(3));
    if (squeeze > 0.6) ink.dataset.guess = word;
    else delete ink.dataset.guess;
  }

  // --- The timeline: as many ticks as the longest trajectory has steps; the others keep pace by their share. ---

  const scrub = byId("scrub");
  let panels = [];
  let ticks = 0;
  let tick = 0;
  let playing = false;
  let owed = 0;
  let clock = 0;
  let opening = 0;

  // Replace the panels by new ones without frames, and return them.
  function open(trajectories) {
    pause();
    [pointed, focused] = [{ panel: null, token: null }, { panel: null, token: null }];
    panels = trajectories.map(makePanel);
    byId("panels").replaceChildren(...panels.map((panel) => panel.panel));
    document.body.classList.toggle("several", panels.length > 1);
    for (const name of Object.keys(occurs)) setLegend(name, false);
    ticks = 0;
    show(0);
    return panels;
  }

  // Add a frame: { step, nfe, tokens: [{ state, text, isAnchor, guesses }] } and, live, the seconds so far.
  function append(panel, frame) {
    if (!panel.frames.length) makeTokens(panel, frame.tokens.length);
    const before = panel.frames[panel.frames.length - 1];
    panel.frames.push(frame);
    frame.tokens.forEach((token, place) => {
      if (isMasked(token) || (before && before.tokens[place] === token)) return;
      const [lead, ink, tail] = pieces(token.text);
      // Where nothing or a new line stands there is a small block as well.
      panel.tokens[place].ghost = [lead, ink || "\u2002", tail];
    });
    for (const [name, test] of Object.entries(occurs)) if (frame.tokens.some(test)) setLegend(name, true);
    ticks = Math.max(ticks, panel.frames.length - 1);
  }

  // Add a frame and show it, unless the reader has gone back or plays.
  function appendLive(panel, frame) {
    const isFollowing = !playing && tick === ticks;
    append(panel, frame);
    show(isFollowing ? ticks : tick);
  }

  // The last frame is there: name how many steps there are, and the settings that the trajectory was made with.
  function finish(panel, changes) {
    Object.assign(panel.trajectory, changes);
    panel.total.textContent = ` of ${panel.frames[panel.frames.length - 1].step}`;
    nameParts(panel);
  }

  function show(to) {
    tick = Math.min(ticks, Math.max(0, to));
    for (const panel of panels) {
      const index = ticks ? Math.round((tick * (panel.frames.length - 1)) / ticks) : 0;
      if (index !== panel.index && panel.frames[index]) draw(panel, index);
    }
    scrub.max = ticks;
    scrub.value = tick;
    scrub.disabled = byId("play").disabled = byId("restart").disabled = ticks === 0;
    scrub.setAttribute("aria-valuetext", `${tick} of ${ticks}`);
    byId("tick").textContent = `${tick} / ${ticks}`;
    byId("back").disabled = tick === 0;
    byId("forward").disabled = tick === ticks;
    showCard();
  }

  function play() {
    clearTimeout(opening);
    if (tick === ticks) show(0);
    if (!playing) requestAnimationFrame(begin);
    setPlaying(ticks > 0);
  }

  function pause() {
    clearTimeout(opening);
    setPlaying(false);
  }

  function setPlaying(now) {
    playing = now;
    document.body.classList.toggle("playing", now);
    byId("play").setAttribute("aria-label", now ? "Pause" : "Play");
  }

  function begin(now) {
    clock = now;
    owed = 0;
    if (playing) requestAnimationFrame(advance);
  }

  function advance(now) {
    if (!playing) return;
    // At speed 1 a trajectory lasts about fourteen seconds, within what an eye can follow or wait for.
    const pace = Math.min(500, Math.max(60, 14000 / Math.max(1, ticks)));
    owed += ((now - clock) * Number(byId("speed").value)) / pace;
    clock = now;
    if (owed >= 1) {
      show(tick + Math.floor(owed));
      owed %= 1;
    }
    if (tick === ticks) pause();
    else requestAnimationFrame(advance);
  }

  function stepTo(to) {
    pause();
    show(to);
  }

  byId("play").addEventListener("click", () => (playing ? pause() : play()));
  byId("restart").addEventListener("click", () => (show(0), play()));
  byId("back").addEventListener("click", () => stepTo(tick - 1));
  byId("forward").addEventListener("click", () => stepTo(tick + 1));
  scrub.addEventListener("input", () => stepTo(Number(scrub.value)));

  const keys = {
    " ": () => (playing ? pause() : play()),
    ArrowLeft: () => stepTo(tick - 1),
    ArrowRight: () => stepTo(tick + 1),
    Home: () => stepTo(0),
    End: () => stepTo(ticks),
    ArrowUp: () => walk(-1),
    ArrowDown: () => walk(1),
    Escape: () => (point(null, null), focused.token && focused.token.blur()),
    g: () => byId("guesses").click(),
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    // What a control does with a key of its own stays its own.
    if (event.target.matches("textarea, select, input:not([type=range], [type=checkbox])")) return;
    if (event.key === " " && event.target.matches("button, summary, [type=checkbox]")) return;
    if (event.key.startsWith("Arrow") && /Up|Down/.test(event.key) && !focused.token) return;
    event.preventDefault();
    keys[event.key]();
  });

  // --- The card of the token that is pointed at or has the focus. ---

  const card = byId("card");
  let pointed = { panel: null, token: null };
  let focused = { panel: null, token: null };
  let marked = null;

  function point(panel, token) {
    pointed = { panel, token };
    showCard();
  }

  function focus(panel, token) {
    focused = { panel, token };
    if (token) {
      pointed = { panel: null, token: null };
      for (const each of panel.tokens) each.token.tabIndex = each.token === token ? 0 : -1;
    }
    showCard();
  }

  function walk(by) {
    const next = focused.panel.tokens[Number(focused.token.dataset.place) + by];
    if (next) next.token.focus();
  }

  function showCard() {
    const { panel, token } = pointed.token ? pointed : focused;
    if (marked && marked !== token) {
      marked.classList.remove("shown");
      marked.removeAttribute("aria-describedby");
    }
    marked = token;
    card.hidden = !token;
    if (!token) return;
    token.classList.add("shown");
    token.setAttribute("aria-describedby", "card");
    card.replaceChildren(...cardParts(panel, Number(token.dataset.place)));
    placeCard(token.querySelector(".ink").getClientRects()[0] || token.getBoundingClientRect());
  }

  function cardParts(panel, place) {
    const now = panel.frames[panel.index].tokens[place];
    const hidden = isMasked(now);
    const kinds = [hidden ? "" : now.state, now.isAnchor ? "anchor" : "", `token ${place + 1} of ${panel.tokens.length}`];
    const name = element("div", "name", hidden ? element("b", "", now.state) : element("q", "", plain(now.text)));
    name.append(element("span", "", kinds.filter(Boolean).join(" · ")));
    return [name, ...guessParts(panel, place), element("h3", "", "History"), historyList(panel, place)];
  }

  function guessParts(panel, place) {
    // A visible token has no guesses any more: then those it had last.
    let index = panel.index;
    while (index > 0 && !panel.frames[index].tokens[place].guesses.length) index--;
    const { guesses, state } = panel.frames[index].tokens[place];
    if (!guesses.length) return state === "given" ? [] : [element("h3", "", `No guesses of the ${panel.trajectory.guesser} here`)];
    const list = element("ol", "guesses");
    for (const [guess, p] of guesses) {
      const fill = element("i");
      fill.style.width = `${100 * p}%`;
      const share = p >= 0.9995 || p < 0.0005 ? (100 * p).toFixed(0) : (100 * p).toFixed(1);
      list.append(element("li", "", element("q", "", plain(guess)), element("span", "meter", fill), element("span", "share-of", `${share}%`)));
    }
    return [element("h3", "", `Guesses of the ${panel.trajectory.guesser} at step ${panel.frames[index].step}`), list];
  }

  function historyList(panel, place) {
    const events = history(panel.frames, place);
    const current = events.filter(([index]) => index <= panel.index).length - 1;
    // A token that came and went often: the changes around this step.
    const first = Math.max(0, Math.min(current - 3, events.length - 7));
    const list = element("ol", "history");
    if (first > 0) list.append(element("li", "", element("span", "", "…"), element("span", "", `${first} earlier`)));
    events.slice(first, first + 7).forEach(([index, label], i) => {
      const state = first + i === current ? "now" : first + i > current ? "later" : "";
      list.append(element("li", state, element("span", "", `step ${panel.frames[index].step}`), element("span", "", label)));
    });
    const rest = events.length - first - 7;
    if (rest > 0) list.append(element("li", "later", element("span", "", "…"), element("span", "", `${rest} later`)));
    return list;
  }

  function placeCard(at) {
    const room = document.querySelector(".bar").getBoundingClientRect().top;
    const { width: wide, height: high } = card.getBoundingClientRect();
    const left = Math.min(Math.max(8, at.left + at.width / 2 - wide / 2), innerWidth - wide - 8);
    const below = at.bottom + 8;
    const top = below + high < room || at.top - high - 8 < 0 ? below : at.top - high - 8;
    card.style.left = `${left}px`;
    card.style.top = `${Math.max(4, Math.min(top, innerHeight - high - 4))}px`;
  }

  for (const event of ["scroll", "resize"]) addEventListener(event, showCard, { passive: true });

  // --- The page. ---

  // What the legend names only where it occurs.
  const occurs = {
    given: (token) => token.state === "given",
    visible: (token) => token.state === "visible",
    guesses: (token) => token.guesses.length > 0,
    anchors: (token) => isMasked(token) && token.isAnchor,
  };
  function setLegend(name, isShown) {
    for (const item of document.querySelectorAll(`.only-${name}`)) item.hidden = !isShown;
  }

  const guessing = byId("guesses");
  const setGuessing = () => document.body.classList.toggle("guessing", guessing.checked);
  guessing.addEventListener("change", setGuessing);
  setGuessing();

  function playStored({ title, states, trajectories }) {
    document.title = byId("title").textContent = title;
    const stored = open(trajectories);
    trajectories.forEach((trajectory, i) => {
      for (const frame of decodeFrames(trajectory, states)) append(stored[i], frame);
      finish(stored[i]);
    });
    show(0);
    const reduceMotion = matchMedia("(prefers-reduced-motion: reduce)").matches;
    opening = setTimeout(() => !reduceMotion && play(), 900);
  }
  if (byId("data")) playStored(JSON.parse(byId("data").textContent));

  return { open, append: appendLive, finish, element };
})();
