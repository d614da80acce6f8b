// The page of a run as its files are, or of several, drawn once.

document.getElementById("page").replaceChildren(...SECTIONS.map((part) => part()).filter(Boolean));
paintAll();
