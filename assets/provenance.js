// Where the heads come from: a small menu beside the model's name.

import { closesBySelf, h } from './dom.js';

export function createProvenance(app) {
  const { parts, t, session } = app;
  const opener = h('summary', { title: t('ui.heads_from_hint') }, t('ui.heads_from'));
  const line = h('p', { class: 'mv-facts-line' });
  const facts = h('dl', { class: 'mv-facts' });
  const train = session.page ? h('a', { href: '#train' }, t('ui.heads_train')) : null;
  const menu = h('details', { id: 'heads-from', class: 'mv-menu' }, opener,
    h('div', { class: 'mv-menu-list mv-facts-box', role: 'group', 'aria-label': t('ui.heads_from_hint') }, line, facts, train));
  parts.model.after(menu);
  const close = closesBySelf(menu, opener);
  train?.addEventListener('click', close);
  return {
    draw({ provenance }) {
      line.textContent = provenance.line;
      facts.replaceChildren(...provenance.rows.flatMap(({ label, value }) => [h('dt', {}, label), h('dd', {}, value)]));
    },
  };
}
