// Lists the requests of openapi.json with the fields of their bodies.
function add(parent, name, text = "") {
  const element = document.createElement(name);
  element.textContent = text;
  return parent.appendChild(element);
}

function describe(schema) {
  const options = schema.anyOf || schema.oneOf;
  if (options) return options.map(describe).filter((text) => text !== "null").join(" or ");
  if (schema.$ref) return schema.$ref.split("/").pop();
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.type === "array") return `list of ${describe(schema.items)}`;
  const limits = [["minimum", "≥"], ["exclusiveMinimum", ">"], ["maximum", "≤"], ["exclusiveMaximum", "<"]];
  return [schema.type, ...limits.filter(([key]) => key in schema).map(([key, sign]) => `${sign} ${schema[key]}`)].join(" ");
}

function addFields(main, schema) {
  const table = add(main, "table");
  const head = add(add(table, "thead"), "tr");
  for (const title of ["field", "value"]) add(head, "th", title).scope = "col";
  const body = add(table, "tbody");
  for (const [name, field] of Object.entries(schema.properties)) {
    const row = add(body, "tr");
    add(add(row, "td"), "code", name);
    add(row, "td", describe(field) + ((schema.required || []).includes(name) ? " (required)" : ""));
  }
}

fetch("openapi.json").then((answer) => answer.json()).then((api) => {
  const main = document.getElementById("main");
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      add(main, "h2", `${method.toUpperCase()} ${path}`);
      add(main, "p", operation.description);
      const schema = operation.requestBody?.content["application/json"].schema;
      if (schema) addFields(main, api.components.schemas[schema.$ref.split("/").pop()]);
    }
  }
});
