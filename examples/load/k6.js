// Chat streams for k6, not tried. k6 reads a stream as one body; `http_req_waiting` is still the time to the first token, because the server
// sends its headers with the first event of an answer (or after 10 s).
import http from "k6/http";
import { check } from "k6";

export const options = {
  scenarios: {
    chat: { executor: "constant-arrival-rate", rate: 4, timeUnit: "1s", duration: "30s", preAllocatedVUs: 32, maxVUs: 256 },
  },
  thresholds: { http_req_failed: ["rate<0.01"], http_req_waiting: ["p(99)<1000"], checks: ["rate>0.99"] },
};

const body = JSON.stringify({
  model: "headrace-tiny",
  messages: [{ role: "user", content: "What is the capital of France?" }],
  max_tokens: 32,
  stream: true,
});
const headers = { "Content-Type": "application/json", Authorization: `Bearer ${__ENV.OPENAI_API_KEY || "none"}` };

export default function () {
  const response = http.post(`${__ENV.BASE_URL || "http://127.0.0.1:8000"}/v1/chat/completions`, body, { headers });
  check(response, { "the stream is whole": (got) => got.status === 200 && got.body.includes("data: [DONE]") });
}
