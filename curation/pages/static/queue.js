// Queue of answers with their states: held, sent, decided, settled, or lost with a problem. The browser stores them, so that no answer
// is lost when a tab closes or the peer is not responding. One tab sends the answers of all tabs.
import { pause } from "/static/page.js";

const HOLD_MS = 10_000;
const AT_ONCE = 4;
const LOOK_MS = 5_000; // between two requests for the label of one answer
const LOOKS = 20; // requests for labels at a time, least recently requested first
const LISTEN_AGAIN_MS = 10_000;
const KEPT = 500; // answers; beyond them settled and lost ones are deleted

export class Queue {
  rows = []; // oldest first
  #others = new BroadcastChannel("folkmoot answers");
  #sending = new Set();
  #notBefore = 0;
  #seen = new Map(); // time of this tab's last request for an answer's label
  #wake = () => {};

  constructor(store, session, changed, lost) {
    this.store = store;
    this.session = session;
    this.changed = changed; // called with whether the peer responds, if known
    this.lost = lost; // called with an answer that does not count, and the problem
    this.#others.onmessage = ({ data }) => this.#look(data.isHere);
  }

  async start() {
    await this.#look();
    if (navigator.locks) navigator.locks.request("folkmoot queue", () => this.#lead());
    else this.#lead();
  }

  get unsent() { return this.rows.filter((row) => row.state === "held" || row.state === "sent"); }

  // Adds an answer, and releases the held one for sending.
  async add(row) {
    const at = Date.now();
    const released = (rows) => ({ put: rows.filter(({ state }) => state === "held").map(sent), gone: outlived(rows) });
    await this.store.change(released, { ...row, state: "held", at, until: at + HOLD_MS });
    await this.#tell();
  }

  // Removes the held answer and returns it. Returns undefined if no answer is held.
  async undo() {
    let held;
    await this.store.change((rows) => {
      held = rows.findLast(({ state }) => state === "held");
      return { gone: held ? [held.assignment] : [] };
    });
    await this.#tell();
    return held;
  }

  async #look(isHere) {
    this.rows = await this.store.answers();
    this.#wake();
    this.changed(isHere);
  }

  #tell(isHere) {
    this.#others.postMessage({ isHere });
    return this.#look(isHere);
  }

  async #update(row, changes) {
    await this.store.change(() => ({ put: [{ ...row, ...changes }] }));
    await this.#tell(true);
    if (changes.state === "lost") this.lost(row, changes.problem);
  }

  // The tab that sends ---

  async #lead() {
    this.#listen();
    for (;;) {
      const woken = new Promise((resolve) => { this.#wake = resolve; });
      const now = Date.now();
      if (this.rows.some((row) => isOver(row, now))) {
        await this.store.change((rows) => ({ put: rows.filter((row) => isOver(row, now)).map(sent) }));
        await this.#tell();
        continue;
      }
      if (now >= this.#notBefore) {
        const waiting = this.rows.filter((row) => row.state === "sent" && !this.#sending.has(row.assignment));
        waiting.slice(0, AT_ONCE - this.#sending.size).forEach((row) => this.#send(row));
        await this.#lookForLabels(now);
      }
      const due = this.rows.filter(({ state }) => state === "held").map(({ until }) => until);
      await Promise.race([woken, pause(Math.max(0, Math.min(LOOK_MS, ...due.map((until) => until - now), this.#wait(now))))]);
    }
  }

  #listen() {
    const events = new EventSource("/api/v1/events");
    events.onopen = () => { this.#notBefore = 0; this.#tell(true); };
    events.onerror = () => {
      if (events.readyState === EventSource.CLOSED) setTimeout(() => this.#listen(), LISTEN_AGAIN_MS); // The peer refused the stream.
      else this.#tell(false);
    };
    events.addEventListener("settled", () => { this.#seen.clear(); this.#wake(); });
  }

  #wait(now) { return now < this.#notBefore ? this.#notBefore - now : Infinity; }

  async #send(row) {
    this.#sending.add(row.assignment);
    try {
      const said = row.answer ? await this.session.submit(row) : await this.session.skip(row);
      if (row.answer && said.height === undefined) this.#notBefore = Date.now() + 1000; // not decided yet: retry
      else await this.#update(row, { state: "decided", height: said.height, suggestion: said.suggestion ?? row.task.suggestion });
    } catch (problem) {
      if (isForLater(problem)) {
        this.#notBefore = Date.now() + (problem.retryMs ?? 1000);
        this.#tell(problem.status !== 0);
      } else await this.#update(row, { state: "lost", problem: problem.message });
    } finally {
      this.#sending.delete(row.assignment);
      this.#wake();
    }
  }

  async #lookForLabels(now) {
    const asked = (row) => this.#seen.get(row.assignment) ?? 0;
    const decided = this.rows.filter((row) => row.state === "decided" && row.answer && now - asked(row) >= LOOK_MS);
    for (const row of decided.sort((a, b) => asked(a) - asked(b)).slice(0, LOOKS)) {
      this.#seen.set(row.assignment, now);
      try {
        const { state, label } = await this.session.call("GET", `/api/v1/annotations/${row.assignment}`);
        if (label) await this.#update(row, { state: "settled", label });
        else if (state === "forfeited") await this.#update(row, { state: "lost", problem: "no peer opened this answer in time" });
      } catch {
        return; // The peer is not responding, or has not applied that block. The next pass retries.
      }
    }
  }
}

const sent = (row) => ({ ...row, state: "sent" });
const isOver = (row, now) => row.state === "held" && row.until <= now;
const isForLater = ({ status }) => status === undefined || status === 0 || status === 401 || status === 429 || status >= 500;

function outlived(rows) {
  const over = rows.filter(({ state }) => state === "settled" || state === "lost");
  return over.slice(0, Math.max(0, rows.length - KEPT)).map(({ assignment }) => assignment);
}
