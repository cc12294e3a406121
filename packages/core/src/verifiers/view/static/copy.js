// Copy texts to the clipboard.

import { h } from "./dom.js";

// A button that copies what `text()` gives.
export function copyButton(text, { label = "copy", title = "copy the text as it was written" } = {}) {
  const button = h("button", { type: "button", class: "quiet", title, onclick: async () => {
    button.textContent = (await copyText(text())) ? "copied" : "not allowed";
    setTimeout(() => (button.textContent = label), 1200);
  } }, label);
  return button;
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // no permission, or a page that is not served from this machine
    const field = h("textarea", { class: "hidden", "aria-hidden": "true" });
    field.value = text;
    document.body.append(field);
    field.select();
    const isCopied = document.execCommand("copy");
    field.remove();
    return isCopied;
  }
}
