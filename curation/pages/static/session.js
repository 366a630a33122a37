// Calls of the HTTP API, some of which an annotator signs.
import { digest, signed } from "/static/key.js";
import { hex, preimage, sealed, unhex } from "/static/wire.js";

const PATIENCE_MS = 20_000; // The peer waits up to 10 s for a decision.

// Throws an error with the problem's `status` and `retryMs`. The status is 0 if the peer is not responding.
export async function call(method, path, body, token) {
  const headers = { "X-Folkmoot": "1", ...(body && { "Content-Type": "application/json" }), ...(token && { Authorization: `Bearer ${token}` }) };
  let reply;
  try {
    const isFile = body instanceof Blob, signal = AbortSignal.timeout(isFile ? 6 * PATIENCE_MS : PATIENCE_MS);
    reply = await fetch(path, { method, headers, body: isFile ? body : body && JSON.stringify(body), signal });
  } catch {
    throw Object.assign(new Error("this peer is not responding"), { status: 0, retryMs: 1000 });
  }
  const isJson = /json/.test(reply.headers.get("Content-Type"));
  const said = isJson ? await reply.json() : await reply.text();
  if (reply.ok) return said;
  const retryMs = 1000 * (Number(reply.headers.get("Retry-After")) || 1);
  throw Object.assign(new Error(said.detail ?? reply.statusText), { status: said.code === "stopping" ? 0 : reply.status, retryMs });
}

export const sessionOf = (network, me) => (me.isCustodial ? new Account(me) : new Session(network, me));

class Session {
  #token = null; // a promise, so that concurrent calls begin one session

  constructor(network, me) {
    this.network = network;
    this.me = me; // { name, publicKey, secret }
  }

  async #sign(tag, fields) {
    return hex(await signed(this.me.secret, preimage(this.network.chain_id, tag, fields)));
  }

  async enrol(invitation) {
    const { name, publicKey } = this.me;
    const signature = await this.#sign("enrol", [name, unhex(this.network.peer_key), false]);
    await call("POST", "/api/v1/annotators", { key: hex(publicKey), name, signature, invitation });
  }

  async #begin() {
    const key = hex(this.me.publicKey);
    const { nonce, expires_ms } = await call("POST", "/api/v1/challenges", { key });
    const signature = await this.#sign("session", [unhex(this.network.peer_key), unhex(nonce), expires_ms]);
    return (await call("POST", "/api/v1/sessions", { key, nonce, expires_ms, signature })).token;
  }

  // Throws the problem of a key that is not enrolled. No error is thrown if the peer is not responding.
  async begun() {
    try {
      await (this.#token = this.#begin());
    } catch (problem) {
      this.#token = null;
      if (problem.status) throw problem;
    }
  }

  // Begins another session if the peer does not know this one, as after a restart of the peer.
  async call(method, path, body) {
    for (let isAgain = false; ; isAgain = true) {
      const token = (this.#token ??= this.#begin());
      try {
        return await call(method, path, body, await token);
      } catch (problem) {
        if (this.#token === token) this.#token = null;
        if (problem.status !== 401 || isAgain) throw problem;
      }
    }
  }

  async submit({ assignment, answer, salt }) {
    const commitment = await digest(sealed(unhex(assignment), unhex(salt), answer));
    const signature = await this.#sign("annotation", [unhex(assignment), commitment]);
    return this.call("POST", "/api/submit", { assignment, answer, salt, signature });
  }

  skip({ assignment, reason }) { return this.call("POST", skipping(assignment), { reason }); }
  release({ assignment }) { return this.call("POST", releasing(assignment)); }
}

// Session of an annotator whose key the peer keeps. The browser sends a cookie, and the peer signs.
class Account {
  constructor(me) { this.me = me; } // { name, publicKey, isCustodial }

  call(method, path, body) { return call(method, path, body); }

  async begun() {
    try {
      const { annotator } = await call("GET", "/api/v1/session");
      if (annotator !== hex(this.me.publicKey)) throw Object.assign(new Error("another account is signed in"), { status: 401 });
    } catch (problem) {
      if (problem.status) throw problem;
    }
  }

  submit({ assignment, answer }) { return call("POST", "/api/submit", { assignment, answer }); }
  skip({ assignment, reason }) { return call("POST", skipping(assignment), { reason }); }
  release({ assignment }) { return call("POST", releasing(assignment)); }
}

const skipping = (assignment) => `/api/v1/assignments/${assignment}/skip`;
const releasing = (assignment) => `/api/v1/assignments/${assignment}/release`;
