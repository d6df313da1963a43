// Where the heads come from: the facts of their own file.

import { h } from './dom.js';

// Label and value of each fact, as children of a <dl>.
export const factRows = (rows) => rows.flatMap(({ label, value }) => [h('dt', {}, label), h('dd', {}, value)]);

export function createProvenance(t) {
  const line = h('p', { class: 'mv-facts-line' });
  const facts = h('dl', { class: 'mv-facts' });
  return {
    element: h('div', { role: 'group', 'aria-label': t('ui.heads_from_hint') }, line, facts),
    draw({ provenance }) {
      line.textContent = provenance.line;
      facts.replaceChildren(...factRows(provenance.rows));
    },
  };
}
