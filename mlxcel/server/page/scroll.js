// The conversation stays at its end while it grows, unless the reader has scrolled away.

const NEAR = 60; // px from the end that still count as the end

export function keepAtEnd(area, button) {
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
  return { jump, grown: () => atEnd && jump() };
}
