// Search where the site is opened as a file: browsers start no worker there, so its script runs in a
// hidden frame instead, and the index comes as a script (docs/site.py writes it).
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const page = frame.contentDocument
      page.open() // or else Firefox replaces it later
      page.write("<body>")
      page.close()
      this.inside = frame.contentWindow
      this.inside.postMessage = (data) =>
        this.dispatchEvent(new MessageEvent("message", { data }))
      const script = page.createElement("script")
      script.src = url
      this.ready = new Promise((loaded) => (script.onload = loaded))
      page.body.append(script)
    }

    postMessage(data) {
      const told = new MessageEvent("message", { data })
      this.ready.then(() => this.inside.dispatchEvent(told))
    }

    terminate() {}
  }
}
