// What comes next and what is cut; and the tree in other engines' words, out and in.

import { h } from './dom.js';
import { copy, download } from './exports.js';
import { fill } from './tuner_charts.js';

export function createFollowing(page) {
  const { t } = page;
  const note = h('p', { class: 'mv-form-help' });
  const next = h('div', { class: 'mv-candidates', role: 'group', 'aria-label': t('tuner.next') });
  const cutTitle = h('h3', {}, t('tuner.cut_title'));
  const cut = h('p', { class: 'mv-form-help' });
  const best = h('div', { class: 'mv-candidates', role: 'group', 'aria-label': t('tuner.cut_title') });
  const rows = (list) => {
    const most = list[0]?.bar || 1;
    return list.map(({ path, name, gain, bar, ms }) => h('button', { class: 'mv-candidate', title: t('tuner.next_add'), 'data-path': path,
      onclick: () => page.act('add', { path }) },
    h('code', {}, name), h('span', { class: 'mv-gain-bar' }, h('i', { style: `width:${(100 * bar / most).toFixed(1)}%` })),
    h('span', { class: 'mv-number' }, gain), h('span', { class: 'mv-number' }, ms)));
  };
  return {
    names: ['following'],
    element: h('div', { class: 'mv-tuner-list' }, h('h3', {}, t('tuner.next')), note, next, cutTitle, cut, best),
    take(_, part) {
      note.textContent = part.note;
      cut.textContent = part.cut;
      cutTitle.hidden = !part.cut;
      next.replaceChildren(...rows(part.next));
      best.replaceChildren(...rows(part.best));
    },
  };
}

export function createExchange(page) {
  const { t } = page;
  const format = h('select', { id: 'tuner-format', 'aria-label': t('tuner.format'), onchange: () => page.act('show', { format: format.value }) });
  const text = h('textarea', { id: 'tuner-export', readonly: true, rows: 3, spellcheck: 'false', 'aria-label': t('tuner.export_text') });
  const state = h('b', { class: 'mv-exchange-state' });
  const values = h('span');
  let ending = '';
  const notes = h('ul', { class: 'mv-exchange-notes' });
  const said = h('span', { class: 'mv-exchange-said', role: 'status' });
  const take = h('button', { id: 'tuner-copy', onclick: async () => {
    said.textContent = t((await copy(text.value)) ? 'tuner.copied' : 'tuner.copy_refused');
  } }, t('tuner.copy'));
  const save = h('button', { id: 'tuner-download', onclick: () => download(`medusa-viz-${format.value}.${ending}`, text.value,
    'text/plain') }, t('tuner.download'));
  const paste = h('textarea', { id: 'tuner-import-text', rows: 2, spellcheck: 'false', 'aria-label': t('tuner.import_text'), placeholder: t('tuner.import_hint') });
  const load = async (given) => {
    const view = await page.act('import', { text: given });
    if (view && !view.notice) paste.value = '';
  };
  const file = h('input', { type: 'file', id: 'tuner-import-file', 'aria-label': t('tuner.curve_file') });
  file.addEventListener('change', async () => {
    if (file.files[0]) await load(await file.files[0].text());
    file.value = '';
  });
  return {
    names: ['exchange'],
    element: h('div', { class: 'mv-tuner-list mv-exchange' },
      h('div', { class: 'mv-exchange-row' }, format, take, save),
      text, h('p', { class: 'mv-exchange-line' }, state, values, said), notes,
      h('div', { class: 'mv-exchange-in' }, paste, h('div', { class: 'mv-exchange-row' },
        h('button', { id: 'tuner-import', onclick: () => load(paste.value) }, t('tuner.import')), file))),
    take(_, part) {
      text.value = part.text;
      said.textContent = '';
      state.textContent = part.state ?? '';
      values.textContent = part.values;
      notes.replaceChildren(...part.notes.map((note) => h('li', {}, note)));
      take.disabled = save.disabled = !part.possible;
    },
    draw({ controls }) {
      fill(format, controls.formats.map(({ name, title }) => [name, title]));
      format.value = controls.format;
      ({ ending } = controls.formats.find(({ name }) => name === controls.format));
    },
  };
}
