// To take away: the session as a file, its text, or the command that runs the same.

import { closesBySelf, h, icon } from './dom.js';

export function createExports(app) {
  const { parts, t, session } = app;
  const item = (id, does) => h('button', { id, role: 'menuitem', onclick: () => choose(does) }, t(`ui.${id.replace('-', '_')}`));
  const items = {
    save: item('save', () => told(session.record(), save)),
    text: item('copy-text', () => told(session.written(), (text) => copied(text, 'ui.text_copied', { n: [...text].length }))),
    command: item('copy-command', () => copied(app.view.run.command, 'ui.command_copied')),
  };
  const opener = h('summary', { class: 'mv-tool', 'aria-label': t('ui.export'), title: t('ui.export') }, icon('export'));
  const menu = h('details', { id: 'export', class: 'mv-menu' }, opener,
    h('div', { class: 'mv-menu-list', role: 'menu', 'aria-label': t('ui.export') }, ...Object.values(items)));
  parts.theme.before(menu);
  const close = closesBySelf(menu, opener);

  async function choose(does) {
    close();
    opener.focus();
    try {
      app.say(await does());
    } catch (error) {
      app.link.onError(error);
    }
  }

  function save(record) {
    const name = `medusa-viz-${new Date().toISOString().slice(0, 19).replaceAll(':', '')}.json`;
    download(name, record);
    return t('ui.saved', { name });
  }

  // Nothing comes of a run that the server no longer has; the next look says why.
  async function told(coming, does) {
    const text = await coming;
    if (text) return does(text);
    await app.act('poll');
    return '';
  }

  const copied = async (text, key, values) => ((await copy(text)) ? t(key, values) : t('ui.copy_refused'));

  return {
    draw({ steps, run, text }) {
      items.save.disabled = steps.count === 0;
      items.text.disabled = !text.chips.some(({ src }) => src !== null);
      items.command.disabled = !run.command;
      items.command.title = run.command_blocked;
    },
  };
}

// Text as a file in the browser's own downloads.
export function download(name, text, type = 'application/json') {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h('a', { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

// A page that is served over plain http from another machine has no clipboard; the old way still works there.
export async function copy(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // Refused; the old way may still be allowed.
    }
  }
  const box = document.body.appendChild(h('textarea', { style: 'position:fixed;opacity:0' }));
  box.value = text;
  box.select();
  const done = document.execCommand('copy');
  box.remove();
  return done;
}
