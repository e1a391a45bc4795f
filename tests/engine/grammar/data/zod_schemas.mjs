// Prints JSON schemas as Zod writes them, for tests/engine/grammar/test_generated_schemas.py.
//
//     npm install zod zod-to-json-schema        (in a folder of its own, to which this file is copied)
//     node zod_schemas.mjs > zod.json
//
// Zod 4 writes them itself, for three targets; for Zod 3 the package zod-to-json-schema does.
import { z } from "zod";
import * as z3 from "zod/v3";
import { zodToJsonSchema } from "zod-to-json-schema";

const Category = z.object({
  name: z.string().max(12),
  get subcategories() {
    return z.array(Category).max(2);
  },
});

const schemas = {
  "person": z.object({ name: z.string().min(1).max(20), age: z.number().int().min(0).max(130), nick: z.string().max(9).optional() }),
  "contact": z.object({ mail: z.email(), site: z.url(), id: z.uuid(), born: z.iso.date(), seen: z.iso.datetime() }),
  "record of integers": z.record(z.string(), z.number().int()),
  "record of an enumeration": z.record(z.enum(["red", "green"]), z.boolean()),
  "partial record": z.partialRecord(z.enum(["a", "b", "c"]), z.int32()),
  "discriminated union": z.discriminatedUnion("kind", [
    z.object({ kind: z.literal("circle"), radius: z.number().positive().lt(100) }),
    z.object({ kind: z.literal("square"), side: z.number().gte(0.5).lte(9.5) }),
  ]),
  "union with null": z.strictObject({ v: z.union([z.string().max(5), z.number(), z.null()]), w: z.boolean().nullable() }),
  "tuple": z.tuple([z.literal("point"), z.int().gte(-9).lte(9), z.number().multipleOf(0.5)]),
  "tuple with rest": z.object({ row: z.tuple([z.string().length(3)]).rest(z.boolean()) }),
  "recursive": Category,
  "defaults": z.object({ unit: z.enum(["C", "F"]).default("C"), note: z.string().max(8).nullish().describe("free text") }),
  "intersection": z.intersection(z.object({ a: z.int().max(9) }), z.object({ b: z.boolean() })),
  "loose object": z.looseObject({ a: z.boolean() }).meta({ title: "Loose", examples: [{ a: true }] }),
  "formats": z.object({
    ip: z.ipv4(), cidr: z.cidrv4(), token: z.nanoid(), code: z.string().regex(/^[A-Z]{2}\d{3}$/), big: z.base64().max(8), tel: z.e164(),
    cuid: z.cuid2().max(9), wait: z.iso.time(),
  }),
  "never and unknown": z.object({ free: z.unknown(), none: z.never().optional(), some: z.any().optional() }),
  "literals": z.object({ level: z.literal([1, 2, 3]), flag: z.literal(true), nothing: z.null() }),
  "floats": z.object({ f32: z.float32(), i32: z.int32(), u32: z.uint32(), safe: z.int().meta({ id: "Safe", deprecated: true }) }),
  "password": z.string().regex(/^(?=.*[a-z])(?=.*\d)[a-z\d]{6,12}$/),
  "template": z.object({ size: z.templateLiteral([z.number().int(), z.enum(["px", "em"])]) }),
  "catchall": z.object({ id: z.int().nonnegative() }).catchall(z.string().max(4)),
  "set of notes": z.object({ tags: z.array(z.string().max(6)).min(1).max(3), pick: z.enum({ Up: 1, Down: -1 }) }),
  "exclusive or": z.xor ? z.xor([z.string().max(3), z.boolean()]) : z.union([z.string().max(3), z.boolean()]),
};

const printed = {};
for (const [name, schema] of Object.entries(schemas)) {
  printed[`zod 4: ${name}`] = z.toJSONSchema(schema);
}
printed["zod 4: input of defaults"] = z.toJSONSchema(schemas["defaults"], { io: "input" });
printed["zod 4: tuple for draft 7"] = z.toJSONSchema(schemas["tuple"], { target: "draft-7" });
printed["zod 4: bounds for draft 4"] = z.toJSONSchema(z.object({ x: z.number().gt(0).lt(1), y: z.int().gt(3) }), { target: "draft-4" });
printed["zod 4: reused definitions"] = z.toJSONSchema(z.object({ from: schemas["person"], to: schemas["person"] }), { reused: "ref" });

const z3Person = z3.z.object({
  name: z3.z.string().max(9),
  role: z3.z.enum(["user", "admin"]),
  scores: z3.z.record(z3.z.number()),
  pair: z3.z.tuple([z3.z.string().max(3), z3.z.number()]),
  left: z3.z.number().gt(2).int().nullable(),
});
printed["zod-to-json-schema: draft 7"] = zodToJsonSchema(z3Person);
printed["zod-to-json-schema: named"] = zodToJsonSchema(z3Person, "Person");
printed["zod-to-json-schema: OpenAPI 3.0"] = zodToJsonSchema(z3Person, { target: "openApi3" });
printed["zod-to-json-schema: OpenAI"] = zodToJsonSchema(z3Person, { target: "openAi" });

console.log(JSON.stringify(printed, null, 1));
