// A line of words that is cut where its place is narrow: whole under the mouse, and by a click, a tap or Enter below it.

import { h } from './dom.js';

const EDGE = 12;

// Returns what writes words into `line`.
export function cutLine(line) {
  const whole = h('p', { class: 'mv-whole', popover: 'auto' });
  const isCut = () => line.scrollWidth > line.clientWidth;
  const isOpen = () => whole.matches(':popover-open');
  let wasOpen = false; // before the press, which closes it, as any press beside it does

  function show() {
    if (!isCut()) return;
    line.closest('.mv').append(whole);
    whole.showPopover();
    const { left, bottom } = line.getBoundingClientRect();
    whole.style.left = `${Math.max(EDGE, Math.min(left, innerWidth - EDGE - whole.offsetWidth))}px`;
    whole.style.top = `${Math.min(bottom, innerHeight - EDGE - whole.offsetHeight)}px`;
  }

  line.addEventListener('pointerdown', () => { wasOpen = isOpen(); });
  line.addEventListener('click', () => { if (!wasOpen) show(); });
  line.addEventListener('keydown', (event) => { if (event.key === 'Enter') show(); });
  return (words) => {
    if (line.textContent === words) return;
    if (isOpen()) whole.hidePopover();
    line.textContent = line.title = whole.textContent = words;
    line.tabIndex = isCut() ? 0 : -1;
  };
}
