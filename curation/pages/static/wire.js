// Bytes of an annotator's signed statements: docs/protocol/values.md and docs/protocol/curation.md.

export const hex = (bytes) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
export const unhex = (text) => Uint8Array.from(text.match(/../g) ?? [], (pair) => parseInt(pair, 16));
export const utf8 = (text) => new TextEncoder().encode(text);

export function join(...parts) {
  const all = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
  let at = 0;
  for (const part of parts) { all.set(part, at); at += part.length; }
  return all;
}

// Encodes a statement's value as canonical msgpack: booleans, non-negative integers, text, bytes, arrays.
export function encode(value) {
  if (value === false || value === true) return Uint8Array.of(value ? 0xc3 : 0xc2);
  if (typeof value === "number") return number(value);
  if (typeof value === "string") {
    const bytes = utf8(value);
    return join(bytes.length < 32 ? Uint8Array.of(0xa0 + bytes.length) : Uint8Array.of(0xd9, bytes.length), bytes);
  }
  if (value instanceof Uint8Array) return join(Uint8Array.of(0xc4, value.length), value);
  return join(Uint8Array.of(0x90 + value.length), ...value.map(encode));
}

function number(value) {
  if (value < 0x80) return Uint8Array.of(value);
  const size = value < 0x100 ? 1 : value < 0x10000 ? 2 : value < 0x100000000 ? 4 : 8;
  const bytes = new Uint8Array(1 + size);
  bytes[0] = { 1: 0xcc, 2: 0xcd, 4: 0xce, 8: 0xcf }[size];
  for (let at = size, rest = BigInt(value); at > 0; at--, rest >>= 8n) bytes[at] = Number(rest & 0xffn);
  return bytes;
}

// The signed bytes of a statement.
export const preimage = (chainId, tag, fields) => join(utf8(`folkmoot/2/${tag}\0`), unhex(chainId), encode([tag, ...fields]));

// The hashed bytes of an answer.
export const sealed = (assignment, salt, answer) => join(utf8("folkmoot/answer\0"), assignment, salt, encode(answer));
