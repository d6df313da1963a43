// Where the heads come from: the facts of their own file.

import { h } from './dom.js';

export function createProvenance(t) {
  const line = h('p', { class: 'mv-facts-line' });
  const facts = h('dl', { class: 'mv-facts' });
  return {
    element: h('div', { role: 'group', 'aria-label': t('ui.heads_from_hint') }, line, facts),
    draw({ provenance }) {
      line.textContent = provenance.line;
      facts.replaceChildren(...provenance.rows.flatMap(({ label, value }) => [h('dt', {}, label), h('dd', {}, value)]));
    },
  };
}
