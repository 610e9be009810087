// What a store keeps, and how requests change it: a bounded map from keys to values. No sockets.
#pragma once

#include <charconv>
#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/distributed/deadline.h>
#include <lockstep/distributed/store/wire.h>
#include <lockstep/tensor/error.h>

namespace lockstep::dist {

/// A request as it came, checked.
struct StoreRequest {
  store_wire::Op op = store_wire::Op::lost;
  std::vector<std::string> keys = {};
  std::string value = {};
  int64_t amount = 0;
  bool with_values = true;  // of get; a wait wants none
  std::chrono::milliseconds timeout{0};
};

/// Nothing when the bytes are no request.
inline std::optional<StoreRequest> read_request(std::string_view frame) {
  using store_wire::Op;
  store_wire::Unpacker in(frame);
  StoreRequest r;
  const uint64_t op = in.number(1);
  if (op < static_cast<uint64_t>(Op::set) || op > static_cast<uint64_t>(Op::look_up))
    return std::nullopt;
  r.op = static_cast<Op>(op);
  r.timeout = bounded(std::chrono::milliseconds(static_cast<int64_t>(in.number(8))));
  r.with_values = in.number(1) != 0;
  r.amount = static_cast<int64_t>(in.number(8));
  r.value = in.text(store_wire::kMostValueBytes);
  const uint64_t keys = in.number(4);
  if (keys > store_wire::kMostKeys) return std::nullopt;
  for (uint64_t i = 0; i < keys && in.ok(); ++i)
    r.keys.emplace_back(in.text(store_wire::kMostKeyBytes));
  const bool one_key = r.op <= Op::remove && r.op != Op::get;
  if (!in.done() || (one_key && r.keys.size() != 1)) return std::nullopt;
  return r;
}

inline std::string request_frame(const StoreRequest& r) {
  store_wire::Packer out;
  out.number(static_cast<uint64_t>(r.op), 1)
      .number(static_cast<uint64_t>(bounded(r.timeout).count()), 8);
  out.number(r.with_values, 1).number(static_cast<uint64_t>(r.amount), 8).text(r.value);
  out.number(r.keys.size(), 4);
  for (const std::string& key : r.keys) out.text(key);
  return out.frame();
}

inline std::string reply(store_wire::Reply kind, std::string_view body = {}) {
  return store_wire::Packer().number(static_cast<uint64_t>(kind), 1).raw(body).frame();
}

class StoreData {
 public:
  bool has(const std::string& key) const { return values_.contains(key); }

  /// set, tell, set_once, add and remove.
  std::string apply(const StoreRequest& r) {
    using store_wire::Op;
    using store_wire::Reply;
    const std::string& key = r.keys[0];
    const auto found = values_.find(key);
    switch (r.op) {
      case Op::set:
      case Op::tell:
        return put(key, r.value) ? reply(Reply::ok) : full();
      case Op::set_once:
        if (found != values_.end()) return reply(Reply::ok, found->second);
        return put(key, r.value) ? reply(Reply::ok, r.value) : full();
      case Op::remove: {
        const bool was = found != values_.end();
        if (was) {
          total_ -= cost(key, found->second);
          values_.erase(found);
        }
        return reply(Reply::ok, was ? "1" : "0");
      }
      default: {
        int64_t n = 0;
        if (found != values_.end()) {
          const std::string& text = found->second;
          const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
          if (error != std::errc() || end != text.data() + text.size())
            return reply(Reply::error, "its value is no number");
        }
        // Wraps around rather than overflows.
        const std::string sum = std::to_string(
            static_cast<int64_t>(static_cast<uint64_t>(n) + static_cast<uint64_t>(r.amount)));
        return put(key, sum) ? reply(Reply::ok, sum) : full();
      }
    }
  }

  /// A flag for each key, whether it is there, and its value.
  std::string present(const StoreRequest& r) const {
    store_wire::Packer out;
    for (const std::string& key : r.keys) {
      const auto found = values_.find(key);
      out.number(found != values_.end(), 1).text(found != values_.end() ? found->second : "");
      if (out.bytes().size() > store_wire::kMostTotalBytes)
        return reply(store_wire::Reply::error, "the values are too many for one answer");
    }
    return reply(store_wire::Reply::ok, out.bytes());
  }

  /// The values of keys that are all there.
  std::string values(const StoreRequest& r) const {
    using store_wire::Reply;
    store_wire::Packer out;
    if (r.with_values)
      for (const std::string& key : r.keys) {
        out.text(values_.at(key));
        if (out.bytes().size() > store_wire::kMostTotalBytes)
          return reply(Reply::error, "the values are too many for one answer");
      }
    return reply(Reply::ok, out.bytes());
  }

 private:
  static size_t cost(const std::string& key, const std::string& value) {
    return key.size() + value.size() + 128;  // with what a map needs for it
  }
  static std::string full() {
    return reply(store_wire::Reply::error, str_cat("the store is full: it keeps at most ",
                                                   store_wire::kMostTotalBytes >> 20, " MiB"));
  }
  bool put(const std::string& key, const std::string& value) {
    const auto found = values_.find(key);
    const size_t before = found == values_.end() ? 0 : cost(key, found->second);
    if (total_ - before + cost(key, value) > store_wire::kMostTotalBytes) return false;
    total_ = total_ - before + cost(key, value);
    values_[key] = value;
    return true;
  }

  std::map<std::string, std::string> values_;
  size_t total_ = 0;
};

}  // namespace lockstep::dist
