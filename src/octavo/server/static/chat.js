// The chat box: one prompt, several answers, each in the colour of its sequence.

import { ask, Refused } from "./link.js";
import { colourOf } from "./paint.js";

const byId = (id) => document.getElementById(id);

export class Chat {
  // refused: called when the server asks for a key
  constructor(refused) {
    this.refused = refused;
    this.messages = [];
    this.turn = null; // the answers being written: {id, cards, colours}
    this.abort = null;
    byId("ask").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    byId("stop").addEventListener("click", () => this.abort?.abort());
    byId("ask-new").addEventListener("click", () => this.clear());
    byId("how").addEventListener("change", () => { byId("heat-label").hidden = byId("how").value === "beam"; });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("ask").requestSubmit();
    });
    for (const hint of document.querySelectorAll(".hint")) {
      hint.addEventListener("click", () => {
        byId("prompt").value = hint.textContent.replace(/\s+/g, " ").trim();
        byId("prompt").focus();
      });
    }
  }

  clear() {
    this.abort?.abort();
    this.messages = [];
    this.turn = null;
    for (const node of [...byId("talk").children]) if (node.id !== "hints") node.remove();
    byId("hints").hidden = false;
    byId("ask-note").textContent = "";
  }

  // The answer that the talk goes on with.
  settle() {
    if (!this.turn) return;
    const kept = this.turn.cards.find((c) => c.node.getAttribute("aria-pressed") === "true") ?? this.turn.cards[0];
    if (kept?.text) this.messages.push({ role: "assistant", content: kept.text });
    else this.messages.pop(); // a question that got no answer
    for (const card of this.turn.cards) if (card !== kept) card.node.classList.add("left");
    this.turn = null;
  }

  async send() {
    const question = byId("prompt").value.trim();
    if (!question || this.abort) return;
    this.settle();
    const n = Math.max(1, Number(byId("n").value) || 1), beam = byId("how").value === "beam";
    const chat = byId("as").value === "chat";
    this.messages.push({ role: "user", content: question });
    byId("hints").hidden = true;
    byId("prompt").value = "";
    const said = document.createElement("p");
    said.className = "said";
    said.textContent = question;
    byId("talk").append(said);
    this.turn = { id: null, cards: [], box: document.createElement("div"), n };
    this.turn.box.className = "answers";
    byId("talk").append(this.turn.box);
    for (let i = 0; i < n; i++) this.card(i);
    const body = { n, max_tokens: Number(byId("most").value) || 160, stream: !beam };
    Object.assign(body, beam ? { use_beam_search: true, beam_width: n } : { temperature: Number(byId("heat").value) });
    Object.assign(body, chat ? { messages: this.messages } : { prompt: question });
    this.turn.id = `map-${crypto.randomUUID?.() ?? Math.random().toString(36).slice(2)}`;
    await this.listen(chat ? "v1/chat/completions" : "v1/completions", body);
  }

  async listen(path, body) {
    this.abort = new AbortController();
    this.busy(true);
    byId("ask-note").textContent = body.use_beam_search ? "beams are told when the search is done" : "";
    try {
      const headers = { "X-Request-Id": this.turn.id }; // by which the map knows its sequences
      const response = await ask(path, { json: body, headers, signal: this.abort.signal });
      if (!body.stream) {
        this.hear(await response.json());
        byId("ask-note").textContent = this.turn?.n > 1 ? "choose the answer to go on with" : "";
        return;
      }
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        const lines = (rest + value).split("\n");
        rest = lines.pop();
        for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") this.hear(JSON.parse(line.slice(6)));
      }
      byId("ask-note").textContent = this.turn?.n > 1 ? "choose the answer to go on with" : "";
    } catch (error) {
      if (error.name === "AbortError") byId("ask-note").textContent = "stopped";
      else byId("ask-note").textContent = error instanceof Refused ? error.message : "the server went away";
      if (error.status === 401) this.refused();
    } finally {
      this.abort = null;
      this.busy(false);
      for (const card of this.turn?.cards ?? []) card.node.classList.remove("busy");
    }
  }

  hear(chunk) {
    if (chunk.error) throw new Refused(500, chunk.error.message);
    if (!this.turn) return;
    const talk = byId("talk"), atEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
    for (const choice of chunk.choices ?? []) {
      const card = this.turn.cards[choice.index] ?? this.card(choice.index);
      const more = choice.delta?.content ?? choice.message?.content ?? choice.text ?? "";
      card.text += more;
      if (more) card.body.append(more);
      if (choice.finish_reason) card.node.classList.remove("busy");
    }
    if (atEnd) talk.scrollTop = talk.scrollHeight;
  }

  card(index) {
    const node = document.createElement("button"), label = document.createElement("b"), body = document.createElement("span");
    node.type = "button";
    node.className = "answer busy";
    node.setAttribute("aria-pressed", String(index === 0));
    label.textContent = String.fromCharCode(97 + index);
    node.append(label, body);
    const { cards, box } = this.turn, card = { node, label, body, text: "" };
    node.addEventListener("click", () => {
      for (const other of cards) other.node.setAttribute("aria-pressed", String(other === card));
    });
    cards[index] = card;
    box.append(node);
    box.classList.toggle("many", cards.length > 1);
    return card;
  }

  // Give each answer the colour of the sequence that writes it.
  tint(full, requests) {
    if (!this.turn?.id || !full) return;
    for (const sequence of full.sequences) {
      if (requests.get(sequence.request) !== this.turn.id) continue;
      const card = this.turn.cards[sequence.branch];
      if (!card) continue;
      const own = `c${colourOf(sequence)}`;
      if (!card.node.classList.contains(own)) card.node.classList.add(own, "tinted");
    }
  }

  busy(on) {
    byId("send").hidden = on;
    byId("stop").hidden = !on;
  }
}
