// An annotator's key. WebCrypto keeps it so that no script can read it again; pages over plain HTTP and older browsers have no
// such keys, so that the seed itself is kept there.
import { join, unhex } from "/static/wire.js";

const PKCS8 = unhex("302e020100300506032b657004220420"); // then the seed
const isNative = await Promise.resolve(crypto.subtle?.generateKey("Ed25519", false, ["sign"])).then(Boolean, () => false);
if (!isNative) await Promise.all([import("/vendor/nacl.min.js"), import("/vendor/sha256.min.js")]);

const imported = (seed, isExtractable) => crypto.subtle.importKey("pkcs8", join(PKCS8, seed), "Ed25519", isExtractable, ["sign"]);

export async function keyOf(seed) {
  if (!isNative) return { secret: seed, publicKey: nacl.sign.keyPair.fromSeed(seed).publicKey };
  const { x } = await crypto.subtle.exportKey("jwk", await imported(seed, true));
  const publicKey = Uint8Array.from(atob(x.replaceAll("-", "+").replaceAll("_", "/")), (character) => character.charCodeAt(0));
  return { secret: await imported(seed, false), publicKey };
}

export async function signed(secret, bytes) {
  if (isNative) return new Uint8Array(await crypto.subtle.sign("Ed25519", secret, bytes));
  return nacl.sign.detached(bytes, nacl.sign.keyPair.fromSeed(secret).secretKey);
}

export async function digest(bytes) {
  return isNative ? new Uint8Array(await crypto.subtle.digest("SHA-256", bytes)) : Uint8Array.from(sha256.array(bytes));
}
