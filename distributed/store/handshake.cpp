// The handshake's bytes; the cryptography is libsodium's.
#include <lockstep/distributed/store/handshake.h>

#include <sodium.h>
#include <unistd.h>

#include <initializer_list>

#include <lockstep/distributed/store/wire.h>
#include <lockstep/tensor/error.h>

namespace lockstep::dist::handshake {

namespace {

using store_wire::Packer;
using store_wire::Unpacker;

constexpr std::string_view kMagic = "Lockstep";
constexpr uint64_t kVersion = 2;
constexpr size_t kMacBytes = crypto_auth_hmacsha256_BYTES;
constexpr size_t kMostRunIdBytes = 256, kMostTextBytes = 400;

void ready() {
  static const int started = sodium_init();
  LOCKSTEP_CHECK(started >= 0, DistError, "init: libsodium cannot be started");
}

const unsigned char* bytes_of(std::string_view s) {
  return reinterpret_cast<const unsigned char*>(s.data());
}

std::string mac(std::string_view token, std::initializer_list<std::string_view> parts) {
  ready();
  crypto_auth_hmacsha256_state state;
  crypto_auth_hmacsha256_init(&state, bytes_of(token), token.size());
  for (const std::string_view part : parts)
    crypto_auth_hmacsha256_update(&state, bytes_of(part), part.size());
  std::string out(kMacBytes, '\0');
  crypto_auth_hmacsha256_final(&state, reinterpret_cast<unsigned char*>(out.data()));
  sodium_memzero(&state, sizeof state);
  return out;
}

bool same(std::string_view a, std::string_view b) {
  return a.size() == b.size() && sodium_memcmp(a.data(), b.data(), a.size()) == 0;
}

// A run id may be longer than what fits.
std::string short_run_id(std::string_view run_id) {
  return run_id.size() <= kMostRunIdBytes ? std::string(run_id) : mac("run id", {run_id});
}

}  // namespace

std::string new_nonce() {
  ready();
  std::string nonce(kNonceBytes, '\0');
  randombytes_buf(nonce.data(), nonce.size());
  return nonce;
}

std::string challenge(std::string_view nonce) {
  return Packer().raw(kMagic).number(kVersion, 2).raw(nonce).bytes();
}

std::string nonce_of(std::string_view challenge) {
  Unpacker in(challenge);
  const bool ours = in.raw(kMagic.size()) == kMagic && in.number(2) == kVersion;
  const std::string_view nonce = in.raw(kNonceBytes);
  return ours && in.done() ? std::string(nonce) : std::string();
}

std::string hello_frame(const Credentials& mine, bool main, ServerId server,
                        std::string_view server_nonce, std::string_view client_nonce) {
  Packer body;
  body.raw(kMagic).number(kVersion, 2).number(static_cast<uint64_t>(mine.attempt), 4);
  body.number(static_cast<uint64_t>(mine.rank), 4).number(static_cast<uint64_t>(mine.size), 4);
  body.number(static_cast<uint64_t>(getpid()), 8).number(main, 1).number(server, 8);
  body.text(short_run_id(mine.run_id)).raw(client_nonce);
  const std::string proof = mac(mine.token, {"client", server_nonce, body.bytes()});
  return body.raw(proof).frame();
}

std::optional<Greeting> read_hello(std::string_view frame, std::string_view token,
                                   std::string_view server_nonce) {
  Unpacker in(frame);
  if (in.raw(kMagic.size()) != kMagic || in.number(2) != kVersion) return std::nullopt;
  Greeting g;
  g.hello.attempt = static_cast<int>(in.number(4) & 0x7FFFFFFF);
  g.hello.rank = static_cast<int>(in.number(4) & 0x7FFFFFFF);
  g.hello.size = static_cast<int>(in.number(4) & 0x7FFFFFFF);
  g.hello.pid = static_cast<int64_t>(in.number(8) & 0x7FFFFFFF);
  g.hello.main = in.number(1) != 0;
  g.hello.server = in.number(8);
  g.hello.run_id = in.text(kMostRunIdBytes);
  g.client_nonce = in.raw(kNonceBytes);
  const std::string_view proof = in.raw(kMacBytes);
  if (!in.done()) return std::nullopt;
  const std::string_view body = frame.substr(0, frame.size() - kMacBytes);
  g.authentic = same(proof, mac(token, {"client", server_nonce, body}));
  return g;
}

std::string stranger_text(const Hello& hello, const Credentials& mine) {
  if (hello.run_id != short_run_id(mine.run_id))
    return str_cat("the run id here is \"", mine.run_id, "\", not \"", hello.run_id, "\"");
  if (hello.attempt != mine.attempt)
    return str_cat("this is attempt ", mine.attempt, " of the job, not ", hello.attempt);
  return {};
}

std::string verdict_frame(Verdict verdict, std::string_view text, ServerId server,
                          std::string_view token, std::string_view server_nonce,
                          std::string_view client_nonce) {
  Packer body;
  body.number(static_cast<uint64_t>(verdict), 1)
      .text(text.substr(0, kMostTextBytes))
      .number(server, 8);
  const std::string proof = mac(token, {"server", server_nonce, client_nonce, body.bytes()});
  return body.raw(proof).frame();
}

Answer read_verdict(std::string_view frame, std::string_view token, std::string_view server_nonce,
                    std::string_view client_nonce) {
  Unpacker in(frame);
  Answer answer;
  const uint64_t verdict = in.number(1);
  answer.text = in.text(kMostTextBytes);
  answer.server = in.number(8);
  const std::string_view proof = in.raw(kMacBytes);
  const bool known = verdict >= static_cast<uint64_t>(Verdict::accepted) &&
                     verdict <= static_cast<uint64_t>(Verdict::met);
  const bool authentic = in.done() && known &&
                         same(proof, mac(token, {"server", server_nonce, client_nonce,
                                                 frame.substr(0, frame.size() - kMacBytes)}));
  if (!authentic) return {Verdict::refused, "refused; is LOCKSTEP_TOKEN the same on all hosts?", 0};
  answer.verdict = static_cast<Verdict>(verdict);
  return answer;
}

}  // namespace lockstep::dist::handshake
