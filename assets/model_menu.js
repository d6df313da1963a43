// The menu beside the model's name: what runs, where its heads come from, and what else can run here.

import { closesBySelf, h, icon } from './dom.js';
import { createProvenance, factRows } from './provenance.js';

export function createModelMenu(app) {
  const { parts, t, session } = app;
  const opener = h('summary', { title: t('ui.model_menu_hint') }, t('ui.model_menu'));
  const title = h('h3', {});
  const provenance = createProvenance(t);
  const train = session.page ? h('a', { href: '#train' }, t('ui.heads_train')) : null;
  const choices = session.models ? createChoices(app, () => close()) : null;
  const menu = h('details', { id: 'model-menu', class: 'mv-menu' }, opener,
    h('div', { class: 'mv-menu-list mv-models', role: 'group', 'aria-label': t('ui.model_menu_hint') },
      title, provenance.element, train, choices?.element));
  parts.model.after(menu);
  const close = closesBySelf(menu, opener);
  train?.addEventListener('click', close);
  const look = async () => {
    const locked = await choices?.look().catch(() => app.say(t('ui.page_lost')));
    if (train) train.hidden = Boolean(locked);
  };
  menu.addEventListener('toggle', () => { if (menu.open) look(); });
  let loading = null;
  return {
    draw(view) {
      title.textContent = view.status.title;
      provenance.draw(view);
      if (menu.open && loading !== view.status.loading) look();
      loading = view.status.loading;
    },
  };
}

// What can be chosen, asked of the server whenever the menu opens, since free memory changes.
function createChoices(app, done) {
  const { t, session } = app;
  const says = h('p', { class: 'mv-models-note' });
  const free = h('span', { class: 'mv-models-free' });
  const local = h('div', { class: 'mv-models-list' });
  const published = h('div', { class: 'mv-models-list' });
  const form = createForm(t, use);
  const element = h('div', { class: 'mv-models-choices' },
    h('h3', {}, t('ui.models_here'), free), says, local,
    h('h3', {}, t('ui.models_hub')), h('p', { class: 'mv-models-note' }, t('ui.models_hub_note')), published, form.element);

  function use(choice) {
    done();
    return app.act('use', choice);
  }

  function entry(one, { locked, busy }) {
    const choice = h('button', { class: 'mv-model-choice', disabled: locked || busy || !one.fits || one.running, 'data-fits': one.fits,
      'aria-current': one.running ? 'true' : null, onclick: () => use(one.choice) },
    h('b', {}, one.title), one.running ? h('i', {}, t('ui.models_running')) : null, h('span', {}, one.note));
    return h('div', { class: 'mv-model-entry' }, choice, ...(one.facts.length ? details(one) : []));
  }

  // A button, and the facts that it shows and hides, so that the list stays short.
  function details(one) {
    const facts = h('dl', { class: 'mv-facts', hidden: true }, ...factRows(one.facts));
    const label = t('ui.models_facts', { title: one.title });
    const more = h('button', { class: 'mv-model-more', title: label, 'aria-label': label, 'aria-expanded': 'false', onclick: () => {
      facts.hidden = !facts.hidden;
      more.setAttribute('aria-expanded', String(!facts.hidden));
    } }, icon('help'));
    return [more, facts];
  }

  let asked = 0;
  return {
    element,
    async look() {
      const own = asked += 1;
      const menu = await session.models();
      if (own !== asked) return menu.locked; // a newer answer comes, or came before this one
      says.textContent = t(menu.locked ? 'ui.models_locked' : menu.busy ? 'ui.models_busy' : 'ui.models_how');
      free.textContent = menu.free;
      local.replaceChildren(...menu.local.map((one) => entry(one, menu)));
      published.replaceChildren(...menu.published.map((one) => entry(one, menu)));
      form.draw(menu);
      element.dataset.busy = menu.busy;
      return menu.locked;
    },
  };
}

function createForm(t, use) {
  const text = (name) => h('input', { type: 'text', id: `models-${name}`, spellcheck: 'false', autocomplete: 'off', maxlength: 500,
    placeholder: t(`ui.models_${name}_hint`) });
  const model = text('model');
  const heads = text('heads');
  const dtype = h('select', { id: 'models-dtype' });
  const asked = h('p', { id: 'models-asked', class: 'mv-models-note' });
  let kept = null;
  const load = h('button', { id: 'models-load', class: 'mv-action' }, t('ui.models_load'));
  const row = (name, ...fields) => h('label', { class: 'mv-models-row' }, h('span', {}, t(`ui.models_${name}`)), ...fields);
  const element = h('form', { class: 'mv-models-form', 'aria-label': t('ui.models_other') }, h('h3', {}, t('ui.models_other')),
    asked, row('model', model), row('heads', heads), h('div', { class: 'mv-models-foot' }, row('dtype', dtype), load));
  element.addEventListener('submit', (event) => {
    event.preventDefault();
    use({ model: model.value, heads: heads.value, dtype: dtype.value });
  });
  return {
    element,
    draw({ locked, busy, dtypes, astray }) {
      element.hidden = locked;
      load.disabled = busy;
      asked.textContent = astray ? t('ui.models_astray') : '';
      const given = JSON.stringify(astray);
      if (astray && given !== kept) {
        heads.value = astray.heads;
        if (astray.model) model.value = astray.model;
        model.focus();
      }
      kept = given;
      if (!dtype.options.length) dtype.append(new Option(t('ui.models_dtype_any'), ''), ...dtypes.map((name) => new Option(name, name)));
    },
  };
}
