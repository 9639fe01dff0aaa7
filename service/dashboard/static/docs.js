"use strict";
// Shows the API's own description; what is tried out from here says what a page of ours says.

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
