// IDX over zlib. Source reads the file, and inflates it if it begins with gzip's magic. The sizes in
// the header are only an upper bound: memory is allocated as content arrives.
#include <lockstep/data/idx.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <vector>

#include <lockstep/tensor/file.h>
#define ZLIB_CONST
#include <zlib.h>

namespace lockstep::data {
namespace {

constexpr size_t kChunk = size_t{1} << 16;
constexpr std::string_view kGetAgain = "; the file is damaged or incomplete: get it again";

class Source {
 public:
  explicit Source(const std::string& path) : file_("read_idx", path), input_(kChunk) {
    refill();
    gzip_ = stream_.avail_in >= 2 && input_[0] == 0x1f && input_[1] == 0x8b;
    // 16: gzip's wrapper, with its CRC and length checked by zlib.
    if (gzip_ && inflateInit2(&stream_, 16 + MAX_WBITS) != Z_OK)
      fail<OutOfMemory>("read_idx: zlib has no memory to inflate ", path);
  }
  ~Source() {
    if (gzip_) inflateEnd(&stream_);
  }
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  const std::string& path() const { return file_.path(); }
  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    fail<IoError>("read_idx: ", file_.path(), ": ", parts...);
  }

  /// Up to `bytes` into `out`; fewer only where the content ends.
  size_t read(uint8_t* out, size_t bytes) {
    size_t done = 0;
    while (done < bytes) {
      const size_t n =
          gzip_ ? inflate_some(out + done, bytes - done) : copy_some(out + done, bytes - done);
      if (n == 0) break;
      done += n;
    }
    return done;
  }

 private:
  bool refill() {
    const size_t n = static_cast<size_t>(std::min<uint64_t>(kChunk, file_.size() - position_));
    file_.read(position_, input_.data(), n);
    position_ += n;
    stream_.next_in = input_.data();
    stream_.avail_in = static_cast<uInt>(n);
    return n > 0;
  }
  size_t copy_some(uint8_t* out, size_t bytes) {
    if (stream_.avail_in == 0 && !refill()) return 0;
    const size_t n = std::min<size_t>(bytes, stream_.avail_in);
    std::memcpy(out, stream_.next_in, n);
    stream_.next_in += n;
    stream_.avail_in -= static_cast<uInt>(n);
    return n;
  }
  /// A gzip file is a sequence of members, and zeros may follow each: block devices, tapes and
  /// aligned copies pad with them. False at the end of the file.
  bool begin_member() {
    do {
      for (; stream_.avail_in > 0 && *stream_.next_in == 0; --stream_.avail_in) ++stream_.next_in;
    } while (stream_.avail_in == 0 && refill());
    if (stream_.avail_in == 0) return false;
    if (inflateReset(&stream_) != Z_OK) refuse("zlib cannot go on", kGetAgain);
    at_end_ = false;
    return true;
  }
  size_t inflate_some(uint8_t* out, size_t bytes) {
    const size_t wanted = std::min(bytes, kChunk);
    stream_.next_out = out;
    stream_.avail_out = static_cast<uInt>(wanted);
    while (stream_.avail_out == wanted) {
      if (at_end_ && !begin_member()) return 0;
      if (stream_.avail_in == 0 && !refill())
        refuse("the gzip data breaks off after ", file_.size(), " bytes", kGetAgain);
      const int status = inflate(&stream_, Z_NO_FLUSH);
      if (status == Z_STREAM_END) {
        at_end_ = true;
      } else if (status != Z_OK && status != Z_BUF_ERROR) {
        refuse("expected gzip data, and zlib found an error before byte ",
               position_ - stream_.avail_in, ": ", stream_.msg ? stream_.msg : "unknown",
               kGetAgain);
      }
    }
    return wanted - stream_.avail_out;
  }

  FileReader file_;
  std::vector<uint8_t> input_;
  uint64_t position_ = 0;
  z_stream stream_{};
  bool gzip_ = false;
  bool at_end_ = false;
};

uint32_t big_endian(const uint8_t* p) {
  return uint32_t{p[0]} << 24 | uint32_t{p[1]} << 16 | uint32_t{p[2]} << 8 | uint32_t{p[3]};
}

struct Header {
  DType dtype;
  Shape shape;
  uint64_t bytes;  // of the values
};

Header read_header(Source& source) {
  uint8_t start[4];
  const size_t n = source.read(start, 4);
  if (n < 4) source.refuse("expected an IDX header of at least 8 bytes, found ", n, kGetAgain);
  if (start[0] != 0 || start[1] != 0 || start[3] == 0)
    source.refuse("expected IDX magic 0, 0, type, dimensions; found ", start[0], ", ", start[1],
                  ", ", start[2], ", ", start[3], "; is this an IDX file?");
  Header header{};
  switch (start[2]) {
    case 0x08:
      header.dtype = DType::u8;
      break;
    case 0x09:
      header.dtype = DType::i8;
      break;
    case 0x0B:
      header.dtype = DType::i16;
      break;
    case 0x0C:
      header.dtype = DType::i32;
      break;
    case 0x0D:
      header.dtype = DType::f32;
      break;
    case 0x0E:
      header.dtype = DType::f64;
      break;
    default:
      source.refuse("expected IDX type 8 (u8), 9 (i8), 11 (i16), 12 (i32), 13 (f32) or 14 (f64), found ",
                    start[2], "; convert the file to one of these");
  }
  const int dims = start[3];
  if (dims > Shape::kMaxDims)
    source.refuse("expected at most ", Shape::kMaxDims, " dimensions, found ", dims,
                  "; is this an IDX file?");
  int64_t extent = static_cast<int64_t>(
      size_of(header.dtype));  // as if no size were 0: strides are products too
  for (int i = 0; i < dims; ++i) {
    uint8_t size[4];
    if (source.read(size, 4) < 4)
      source.refuse("expected ", dims, " sizes, and it ends after ", i, kGetAgain);
    header.shape.push_back(big_endian(size));
    if (__builtin_mul_overflow(extent, std::max<int64_t>(header.shape[i], 1), &extent))
      source.refuse("the sizes overflow: ", header.shape, "...; is this an IDX file?");
  }
  header.bytes = static_cast<uint64_t>(header.shape.numel()) * size_of(header.dtype);
  return header;
}

// Allocates as content arrives, up to what the header says.
std::vector<uint8_t> read_values(Source& source, const Header& header) {
  std::vector<uint8_t> values;
  while (values.size() < header.bytes) {
    const size_t before = values.size();
    const uint64_t step = std::max<uint64_t>(before, uint64_t{1} << 20);
    try {
      values.resize(before + static_cast<size_t>(std::min<uint64_t>(step, header.bytes - before)));
    } catch (const std::exception&) {
      fail<OutOfMemory>("read_idx: ", source.path(), ": no memory for more than ", before, " of ",
                        header.bytes, " bytes of values for shape ", header.shape,
                        "; is this the right file?");
    }
    const size_t n = source.read(values.data() + before, values.size() - before);
    if (before + n < values.size())
      source.refuse("expected ", header.bytes, " bytes of values for shape ", header.shape,
                    ", found ", before + n, kGetAgain);
  }
  uint8_t extra;
  if (source.read(&extra, 1) != 0)
    source.refuse("expected ", header.bytes, " bytes of values for shape ", header.shape,
                  ", found more after them", kGetAgain);
  return values;
}

/// Turns numbers of `size` bytes, which are big-endian, into the machine's.
void to_native(std::vector<uint8_t>& values, size_t size) {
  if (size == 1 || std::endian::native == std::endian::big) return;
  for (auto at = values.begin(); at != values.end(); at += static_cast<ptrdiff_t>(size))
    std::reverse(at, at + static_cast<ptrdiff_t>(size));
}

}  // namespace

Tensor read_idx(const std::string& path) {
  Source source(path);
  const Header header = read_header(source);
  auto values = std::make_shared<std::vector<uint8_t>>(read_values(source, header));
  to_native(*values, size_of(header.dtype));
  return from_blob(values->data(), header.shape, {.dtype = header.dtype}, [values] {});
}

}  // namespace lockstep::data
