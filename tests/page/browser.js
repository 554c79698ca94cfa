/** What the modules of the page expect of a browser, for tests in node: a document, a location, and a server. */

import { createServer } from "node:http";
import { GlobalRegistrator } from "@happy-dom/global-registrator";

const nodeFetch = globalThis.fetch;

/** Gives this process a window at an address. */
export function openWindow(url = "http://127.0.0.1/") {
  GlobalRegistrator.register({ url });
}

/** Starts a server that answers with what `answer(path, request)` returns as JSON, and has the page ask it. */
export async function serve(answer) {
  const requests = [];
  const server = createServer((request, response) => {
    requests.push(request.url);
    const { status = 200, body } = answer(request.url, request);
    response.writeHead(status, { "Content-Type": "application/json" });
    response.end(typeof body === "string" ? body : JSON.stringify(body));
  });
  await new Promise((resolve) => {
    server.listen(0, "127.0.0.1", resolve);
  });
  const base = `http://127.0.0.1:${server.address().port}/`;
  globalThis.fetch = (path, options) => nodeFetch(new URL(path, base), options);
  return { requests, close: () => server.close() };
}
