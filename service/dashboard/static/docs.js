"use strict";
// Shows the API's own description; what is tried out from here says what a page of ours says.

// Its own look for dark paper hangs on a class of the page.
const dark = matchMedia("(prefers-color-scheme: dark)");
const wearIt = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", wearIt);
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
