// What stands above a chart: per curve its mark or a piece of its line, and its name.

import { h } from './dom.js';

// `dark` maps light colours to dark ones; it is empty in the light theme.
export function legendKeys(entries, dark) {
  return entries.map(({ label, color, dash, glyph }) => {
    const shown = dark[color.toUpperCase()] ?? color;
    const mark = glyph ? h('b', { style: `color:${shown}` }, glyph)
      : h('i', { style: `border-color:${shown};border-top-style:${dash === 'solid' ? 'solid' : 'dashed'}` });
    return h('span', {}, mark, label);
  });
}
