"use strict";
// Shows the API's own description; what is tried out from here says what a page of ours says.

// Its own look for dark paper hangs on a class of the page.
const wearIt = () => document.documentElement.classList.toggle("dark-mode", isDark());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", wearIt);
document.addEventListener("cairn:theme", wearIt);
wearIt();

document.addEventListener("DOMContentLoaded", () => {
  SwaggerUIBundle({
    url: "/openapi.json",
    dom_id: "#api",
    deepLinking: true,
    docExpansion: "none",
    defaultModelsExpandDepth: -1,
    validatorUrl: null,
    requestInterceptor: (request) => {
      Object.assign(request.headers, csrfHeaders());
      return request;
    },
  });
});
