// An annotator's key. WebCrypto generates it and signs with it on https and localhost. Elsewhere the peer keeps a key for the annotator.

export const hasKeys = await Promise.resolve(crypto.subtle?.generateKey("Ed25519", false, ["sign"])).then(Boolean, () => false);

// Generates a key. Its secret can be exported until a backup is saved.
export async function made() {
  const { privateKey, publicKey } = await crypto.subtle.generateKey("Ed25519", true, ["sign"]);
  return { secret: privateKey, publicKey: new Uint8Array(await crypto.subtle.exportKey("raw", publicKey)) };
}

export const signed = async (secret, bytes) => new Uint8Array(await crypto.subtle.sign("Ed25519", secret, bytes));
export const digest = async (bytes) => new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));

export async function isSignedBy(publicKey, bytes, signature) {
  const key = await crypto.subtle.importKey("raw", publicKey, "Ed25519", false, ["verify"]);
  return crypto.subtle.verify("Ed25519", key, signature, bytes);
}
