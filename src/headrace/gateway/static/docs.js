// Everything comes from this server: no validator, no fonts, no CDN.
window.ui = SwaggerUIBundle({ url: "/openapi.json", dom_id: "#swagger-ui", validatorUrl: null, deepLinking: true });
