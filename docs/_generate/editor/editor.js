// CodeMirror for Python, as one file: what the lessons in the browser write in.

import { defaultKeymap, history, historyKeymap, indentWithTab } from "@codemirror/commands";
import { python } from "@codemirror/lang-python";
import { bracketMatching, indentOnInput, indentUnit, syntaxHighlighting } from "@codemirror/language";
import { EditorView, drawSelection, highlightActiveLine, keymap, lineNumbers } from "@codemirror/view";
import { classHighlighter } from "@lezer/highlight";

// An editor in `parent`; onchange() after every change, keys: [{key, run}].
export function openEditor(parent, { text, label, onchange, keys }) {
  const view = new EditorView({
    doc: text,
    parent,
    extensions: [
      lineNumbers(),
      history(),
      drawSelection(),
      highlightActiveLine(),
      indentOnInput(),
      bracketMatching(),
      indentUnit.of("    "),
      python(),
      syntaxHighlighting(classHighlighter),
      keymap.of([...keys, indentWithTab, ...defaultKeymap, ...historyKeymap]),
      EditorView.contentAttributes.of({ "aria-label": label, tabindex: "0" }),
      EditorView.updateListener.of((update) => update.docChanged && onchange()),
    ],
  });
  return {
    text: () => view.state.doc.toString(),
    set: (text) => view.dispatch({ changes: { from: 0, to: view.state.doc.length, insert: text } }),
    focus: () => view.focus(),
  };
}
