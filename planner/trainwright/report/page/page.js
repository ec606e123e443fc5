"use strict";
// The button changes between the themes; without a choice the page follows the system.
const root = document.documentElement;
const button = document.getElementById("theme");
const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
const name = () => { button.textContent = dark() ? "Light" : "Dark"; };
button.hidden = false;
button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
name();
