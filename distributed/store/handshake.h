// The handshake of a job's TCP connections: each side proves to the other that it knows the job's
// token without sending it. The server sends a nonce; the client answers with who it is, a nonce of
// its own and an HMAC-SHA256, keyed by the token, over all of it; the server's verdict carries one
// over the client's nonce. Whoever lacks the token learns that it was refused, and nothing else.
// What follows on the connection is neither encrypted nor signed: the network must keep others out
// of it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::dist {

/// Which job a process belongs to, and as which rank.
struct Credentials {
  std::string run_id;
  int attempt = 0;
  int rank = 0, size = 1;
  std::string token;
};

/// Of one server's life. A process may meet its job's ranks again, with a server at the port of the
/// last one: what still belongs to that is told apart.
using ServerId = uint64_t;

namespace handshake {

inline constexpr size_t kNonceBytes = 32;
inline constexpr size_t kChallengeBytes = 8 + 2 + kNonceBytes;

/// How a server answers.
enum class Verdict : uint8_t {
  accepted = 1,
  refused,   // of another job, or without the token: there may be another server to try
  rejected,  // of this job, and it cannot be: the rank is there already, the sizes differ
  met,       // the ranks of this server have met: it may be the server of an earlier rendezvous
};

/// What a client says of itself.
struct Hello {
  int attempt = 0, rank = 0, size = 0;
  int64_t pid = 0;
  bool main = true;     // the connection whose end is the end of the rank
  ServerId server = 0;  // of the main connection, for those that are not
  std::string run_id;
};

std::string new_nonce();

std::string challenge(std::string_view nonce);
/// The nonce of a challenge; empty when it is none.
std::string nonce_of(std::string_view challenge);

/// The client's answer, to be sent as a frame.
std::string hello_frame(const Credentials& mine, bool main, ServerId server,
                        std::string_view server_nonce, std::string_view client_nonce);
struct Greeting {
  Hello hello;
  std::string client_nonce;
  bool authentic = false;  // it was made with the token
};
/// Nothing when the bytes are no hello at all.
std::optional<Greeting> read_hello(std::string_view frame, std::string_view token,
                                   std::string_view server_nonce);

/// Why a process that has the token is still none of ours: another run id or attempt; empty if it
/// is.
std::string stranger_text(const Hello& hello, const Credentials& mine);

std::string verdict_frame(Verdict verdict, std::string_view text, ServerId server,
                          std::string_view token, std::string_view server_nonce,
                          std::string_view client_nonce);
struct Answer {
  Verdict verdict = Verdict::refused;
  std::string text;
  ServerId server = 0;
};
/// A verdict without the token's HMAC is a refusal, whatever it says.
Answer read_verdict(std::string_view frame, std::string_view token, std::string_view server_nonce,
                    std::string_view client_nonce);

}  // namespace handshake
}  // namespace lockstep::dist
