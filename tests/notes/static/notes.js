document.querySelector("h1").hidden = false;
