"use strict";
// Text from users, links and the server enters the page as text nodes and values alone, never as markup.
(() => {
  const { element } = player;
  const form = document.getElementById("form");
  const byId = (id) => document.getElementById(id);
  const field = (name) => form.elements.namedItem(name);
  const HOLE = /_{3,}(?:\{[^{}\n]*\})?/g; // as the server reads templates
  const FIELDS = ["text", "model", "sampler", "steps", "compare", "model2", "sampler2", "steps2", "seed"];
  const SETTINGS = [...form.querySelectorAll("[data-setting]")].map((each) => each.name); // that the server lists
  FIELDS.push("max_tokens", ...SETTINGS, "guesses");
  const NUMBERS = ["seed", ...SETTINGS]; // of both sides
  const EXAMPLE = "The old man ___{6} to the window, and ___{8} the rain.";
  let models = [];
  let running = null; // what stops the requests
  let writing = 0; // the timer of the link

  // What needs no reading is there for screen readers alone.
  function say(message, kind = "unseen") {
    byId("status").textContent = message;
    byId("status").className = kind;
  }

  // --- The text: holes are colored by a copy behind it. ---

  function showText() {
    const text = field("text").value;
    const parts = [];
    let end = 0;
    for (const match of text.matchAll(HOLE)) {
      parts.push(text.slice(end, match.index), element("mark", "", match[0]));
      end = match.index + match[0].length;
    }
    byId("mirror").replaceChildren(...parts, text.slice(end), "\n");
    const count = parts.length / 2;
    byId("hint").textContent = count ? (count === 1 ? "1 hole" : `${count} holes`) : `${field("max_tokens").value} new tokens`;
  }

  function putHole() {
    const area = field("text");
    area.focus();
    area.setRangeText("___", area.selectionStart, area.selectionEnd, "end");
    changeSettings();
  }

  // --- The settings, which the address holds after #. ---

  // Browsers limit how often the address may change: while a text is typed it waits for a pause.
  function changeSettings() {
    clearTimeout(writing);
    writing = setTimeout(writeLink, 300);
    showSettings();
  }

  function writeLink() {
    clearTimeout(writing);
    const values = new URLSearchParams();
    for (const name of FIELDS) {
      const each = field(name);
      const value = each.type === "checkbox" ? (each.checked ? "1" : "") : each.value;
      if (value !== "" && !each.matches(":disabled")) values.set(name, value);
    }
    history.replaceState(null, "", `#${values}`);
  }

  function readLink() {
    const values = new URLSearchParams(location.hash.slice(1));
    const hasLink = location.hash.length > 1;
    const missing = [];
    for (const name of FIELDS) {
      const each = field(name);
      const value = values.get(name);
      if (each.type === "checkbox") each.checked = value === "1";
      else if (hasLink) each.value = value ?? each.defaultValue ?? "";
      if (each.tagName === "SELECT" && each.selectedIndex < 0) {
        each.selectedIndex = 0;
        if (value) missing.push(value);
      }
    }
    if (!hasLink) field("text").value = EXAMPLE;
    showSettings();
    if (missing.length) say(`The link names ${missing.join(", ")}, which this server does not have.`, "error");
  }

  function showSettings() {
    const isComparing = field("compare").checked;
    byId("other").hidden = byId("other").disabled = !isComparing;
    document.body.classList.toggle("several", isComparing);
    for (const side of ["", "2"]) {
      const { samplers = [] } = models.find((each) => each.id === field(`model${side}`).value) || {};
      for (const name of ["sampler", "steps"]) field(name + side).disabled = models.length > 0 && !samplers.length;
    }
    showText();
  }

  async function loadModels() {
    const answer = await request("v1/models");
    models = (await answer.json()).data;
    const samplers = [...new Set(models.flatMap((each) => each.samplers))];
    for (const side of ["", "2"]) {
      field(`model${side}`).replaceChildren(...models.map((each) => new Option(each.id)));
      field(`sampler${side}`).replaceChildren(new Option("auto", ""), ...samplers.map((name) => new Option(name)));
    }
    say("");
    readLink();
  }

  // --- Requests. ---

  async function request(path, body, signal) {
    const headers = { "content-type": "application/json" };
    if (byId("key").value) headers.authorization = `Bearer ${byId("key").value}`;
    const answer = await fetch(path, body ? { method: "POST", headers, signal, body: JSON.stringify(body) } : { headers });
    if (answer.ok) return answer;
    if (answer.status === 401) setMore(true);
    const { error } = await answer.json().catch(() => ({}));
    throw new Error(error ? error.message : `the server answered ${answer.status}`);
  }

  // The server-sent events of an answer.
  async function* readEvents(answer) {
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ; ) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the server closed the connection");
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const content = part.slice("data: ".length);
        if (content === "[DONE]") return;
        const event = JSON.parse(content);
        if (event.error) throw new Error(event.error.message);
        yield event;
      }
    }
  }

  function describeRequest(side) {
    const text = field("text").value;
    const body = { model: field(`model${side}`).value, stream: true, guesses: Number(field("guesses").value) };
    for (const name of NUMBERS) if (field(name).value !== "") body[name] = Number(field(name).value);
    const [sampler, steps] = [field(`sampler${side}`), field(`steps${side}`)];
    if (!sampler.disabled && sampler.value) body.sampler = sampler.value;
    if (!steps.disabled && steps.value) body.steps = Number(steps.value);
    if (text.search(HOLE) >= 0) return ["v1/infill", { ...body, template: text }];
    return ["v1/completions", { ...body, prompt: text, max_tokens: Number(field("max_tokens").value) }];
  }

  // Sample one text into a panel; a frame before the first step is made from the first one.
  async function fill(panel, [path, body], signal) {
    const began = performance.now();
    let made = body; // the settings that the text was made with
    let before = []; // each token as it was sent, and as an object
    for await (const { choices } of readEvents(await request(path, body, signal))) {
      const { step, nfe, tokens, settings } = choices[0].draft;
      const frame = { step, nfe, seconds: (performance.now() - began) / 1000 };
      before = tokens.map((sent, place) => {
        const [state, text, isAnchor, guesses] = sent;
        const key = JSON.stringify(sent);
        return before[place]?.key === key ? before[place] : { key, token: { state, text, isAnchor, guesses } };
      });
      frame.tokens = before.map((each) => each.token);
      if (!panel.frames.length) {
        const hidden = { state: "hidden", text: "", isAnchor: false, guesses: [] };
        const start = frame.tokens.map((token) => (token.state === "given" ? token : hidden));
        player.append(panel, { step: 0, nfe: 0, seconds: 0, tokens: start });
      }
      player.append(panel, frame);
      if (settings) made = { ...settings, model: body.model };
    }
    const rows = Object.entries(made).filter(([, value]) => value !== null);
    player.finish(panel, {
      title: describeTitle(made),
      settings: rows.map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)]),
      seconds: Math.round(performance.now() - began) / 1000,
    });
  }

  const describeTitle = ({ model, sampler }) => [model, sampler].filter(Boolean).join(" · ");

  async function generate() {
    const stopper = new AbortController();
    if (field("seed").value === "") chooseSeed();
    writeLink();
    const requests = (field("compare").checked ? ["", "2"] : [""]).map(describeRequest);
    const panels = player.open(
      requests.map(([, body]) => {
        const { method } = models.find((each) => each.id === body.model) || {};
        const guesser = method === "adlm" ? "anchor network" : "network";
        return { title: describeTitle(body), guesser, settings: [], seconds: 0 };
      }),
    );
    document.body.classList.remove("empty");
    if (byId("panels").getBoundingClientRect().top > 0.6 * innerHeight) byId("panels").scrollIntoView();
    setRunning(stopper);
    say("Sampling …");
    try {
      await Promise.all(panels.map((panel, i) => fill(panel, requests[i], stopper.signal)));
      say(panels.map(({ frames }) => describeEnd(frames[frames.length - 1])).join(" · "));
    } catch (error) {
      if (running !== stopper) return; // another one has begun
      stopper.abort();
      say(error.name === "AbortError" ? "Stopped." : error.message, error.name === "AbortError" ? "" : "error");
      if (!panels.some(({ frames }) => frames.length)) document.body.classList.add("empty");
    }
    if (running === stopper) setRunning(null);
  }

  const describeEnd = ({ nfe, seconds }) => `${nfe} network evaluations in ${seconds.toFixed(2)} s`;

  function chooseSeed() {
    field("seed").value = Math.floor(Math.random() * 2 ** 31);
    writeLink();
  }

  function setRunning(stopper) {
    running = stopper;
    byId("run").textContent = stopper ? "Stop" : "Generate";
    document.body.classList.toggle("running", stopper !== null);
  }

  function setMore(isOpen) {
    byId("extra").hidden = !isOpen;
    byId("more").setAttribute("aria-expanded", isOpen);
  }

  // --- What a reader does. ---

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else generate();
  });
  form.addEventListener("input", (event) => event.target.name && changeSettings());
  field("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !running) form.requestSubmit();
  });
  byId("hole").addEventListener("click", putHole);
  byId("reseed").addEventListener("click", chooseSeed);
  byId("more").addEventListener("click", () => setMore(byId("extra").hidden));
  byId("key").addEventListener("change", () => loadModels().catch((error) => say(error.message, "error")));
  byId("link").addEventListener("click", async () => {
    writeLink();
    try {
      await navigator.clipboard.writeText(location.href);
      say("Link copied.", "");
    } catch {
      say("Copy the link from the address bar.", "");
    }
  });
  addEventListener("hashchange", readLink);
  showSettings();
  loadModels().catch((error) => say(error.message, "error"));
})();
