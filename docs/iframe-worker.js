// Searching in pages opened from disk, where browsers start no worker: its script runs in a hidden frame.
// The plugin `offline` would load a script of this name from the network.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.inside = new Promise((resolve) => {
        frame.onload = () => {
          const inside = frame.contentWindow
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
          const script = inside.document.createElement("script")
          script.src = url
          script.onload = () => resolve(inside)
          inside.document.head.append(script)
        }
      })
      document.documentElement.append(frame)
    }

    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
