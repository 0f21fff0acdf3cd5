/* SPDX-License-Identifier: Apache-2.0 */
/* Search on pages that are opened as files. Browsers start no worker there, so the worker's script
   runs in a hidden frame. MkDocs' plugin `offline` would ask another site for such a file. */
if (location.protocol === "file:") {
  const runtime = `
    postMessage = (data) => parent.postMessage(data, "*");
    importScripts = async (...urls) => {
      for (const src of urls) {
        await new Promise((loaded, failed) => {
          const script = document.createElement("script");
          Object.assign(script, { src, onload: loaded, onerror: failed });
          document.body.append(script);
        });
      }
    };`;
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      window.addEventListener("message", ({ source, data }) => {
        if (source === inside) this.dispatchEvent(new MessageEvent("message", { data }));
      });
      inside.document.open();
      inside.document.write(
        `<body><script>${runtime}</script><script src="${url}"></script></body>`,
      );
      inside.document.close();
      const ready = new Promise((loaded) => inside.addEventListener("load", loaded));
      this.postMessage = async (data) => {
        await ready;
        inside.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
      };
    }
  };
}
