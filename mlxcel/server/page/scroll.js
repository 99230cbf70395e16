// The conversation stays at its end while it grows, unless the reader has scrolled away.

const NEAR = 60; // px from the end that still count as the end

/** Keep `area`, whose content is `grows`, at its end; `button` leads back there. The function returned does too. */
export function keepAtEnd(area, grows, button) {
  let atEnd = true;
  const jump = () => {
    atEnd = true;
    area.scrollTop = area.scrollHeight;
    button.hidden = true;
  };
  area.addEventListener("scroll", () => {
    atEnd = area.scrollHeight - area.scrollTop - area.clientHeight < NEAR;
    button.hidden = atEnd;
  });
  button.addEventListener("click", jump);
  const sizes = new ResizeObserver(() => atEnd && jump());
  sizes.observe(area);
  sizes.observe(grows);
  return jump;
}
