// Panels of which one is shown, by tabs.

import { h } from './dom.js';

export function createTabs(label, entries) {
  const tabs = entries.map(([name, title]) => h('button', { role: 'tab', id: `tuner-tab-${name}`, 'data-tab': name,
    'aria-controls': `tuner-${name}`, onclick: () => open(name) }, title));
  const list = h('div', { class: 'mv-tabs', role: 'tablist', 'aria-label': label }, ...tabs);
  for (const [name, , panel] of entries) {
    panel.id = `tuner-${name}`;
    panel.setAttribute('role', 'tabpanel');
    panel.setAttribute('aria-labelledby', `tuner-tab-${name}`);
  }
  list.addEventListener('keydown', (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const at = tabs.indexOf(event.target);
    if (!step || at < 0) return;
    const next = tabs[(at + step + tabs.length) % tabs.length];
    open(next.dataset.tab);
    next.focus();
  });
  const element = h('section', { class: 'mv-panel', 'aria-label': label }, list, ...entries.map(([, , panel]) => panel));

  function open(name) {
    for (const tab of tabs) {
      const own = tab.dataset.tab === name;
      tab.setAttribute('aria-selected', String(own));
      tab.tabIndex = own ? 0 : -1;
    }
    for (const [other, , panel] of entries) panel.hidden = other !== name;
    element.dataset.tab = name;
  }

  open(entries[0][0]);
  return { element, open };
}
