// The way to the server: each request carries the key if there is one.

const NAME = "octavo-key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = () => sessionStorage.getItem(NAME) ?? "";
export const keep = (value) => (value ? sessionStorage.setItem(NAME, value) : sessionStorage.removeItem(NAME));

// A response that is well; otherwise Refused with what the server says is wrong.
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key()) headers.Authorization = `Bearer ${key()}`;
  if (options.json !== undefined) headers["Content-Type"] = "application/json";
  const body = options.json !== undefined ? JSON.stringify(options.json) : undefined;
  const response = await fetch(path, { method: body ? "POST" : "GET", ...options, headers, body, cache: "no-store" });
  if (response.ok) return response;
  let message = `the server says ${response.status}`;
  try { message = (await response.json()).error.message; } catch { /* no JSON: the number has to do */ }
  throw new Refused(response.status, message);
}
