// Verification of a block's certificate, from its bytes alone: docs/protocol/curation.md, "Blocks".
import { digest, isSignedBy } from "/static/key.js";
import { hex, join, unhex, utf8 } from "/static/wire.js";

const hashed = async (domain, bytes) => hex(await digest(join(utf8(`folkmoot/${domain}\0`), bytes)));

// Decodes canonical msgpack of headers and certificates: numbers, text, bytes, arrays, nil. Maps are arrays of pairs.
function decoded(bytes) {
  let at = 0;
  const take = (size) => bytes.subarray(at, (at += size));
  const number = (size) => take(size).reduce((sum, byte) => 256 * sum + byte, 0);
  const many = (count) => Array.from({ length: Math.min(count, bytes.length) }, value);
  function value() {
    const first = number(1);
    if (first < 0x80) return first;
    if (first < 0xa0) return many(first - 0x90);
    if (first < 0xc0) return new TextDecoder().decode(take(first - 0xa0));
    if (first < 0xc6) return first === 0xc0 ? null : take(number(first - 0xc3));
    return first < 0xd0 ? number(2 ** (first - 0xcc)) : many(number(2));
  }
  return value();
}

// Returns the number of valid signatures and of voters, as a text. Throws an error that names the mistake.
export async function verified(height, block, chainId) {
  const [header, certificate, set] = [block.header, block.certificate, block.voters].map(unhex);
  const [vote, signatures] = decoded(certificate);
  const [tag, voters, heightOfVote, , digestOfVote] = decoded(vote);
  const fields = decoded(header), keys = decoded(set).map(hex);
  if (tag !== "commit" || heightOfVote !== height || fields[0] !== height) throw new Error("the certificate belongs to another block");
  if (hex(digestOfVote) !== (await hashed("block", header))) throw new Error("the signatures belong to another header");
  const named = await hashed("voters", set);
  if (hex(voters) !== named || hex(fields[4]) !== named) throw new Error("the block names a different set of voters");
  const signed = join(utf8("folkmoot/2/commit\0"), unhex(chainId), vote), good = new Set();
  for (const [key, signature] of signatures) {
    if (!keys.includes(hex(key))) throw new Error("a signer is not a voter");
    if (!(await isSignedBy(key, signed, signature))) throw new Error("a signature is invalid");
    good.add(hex(key));
  }
  const quorum = Math.ceil((keys.length + Math.floor((keys.length - 1) / 3) + 1) / 2);
  if (good.size < quorum) throw new Error(`${good.size} of ${quorum} required signatures`);
  return `${good.size} of ${keys.length} signatures`;
}
