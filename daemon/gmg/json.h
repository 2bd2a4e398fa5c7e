// A small JSON writer: objects and arrays, escaped strings, integers, no dependencies. Commas are
// its business.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <type_traits>

namespace slice::gmg {

class JsonWriter {
 public:
  JsonWriter& BeginObject() { return Open('{'); }
  JsonWriter& EndObject() { return Close('}'); }
  JsonWriter& BeginArray() { return Open('['); }
  JsonWriter& EndArray() { return Close(']'); }
  JsonWriter& Key(std::string_view key) {
    Comma();
    Quote(key);
    text_ += ':';
    fresh_ = true;
    return *this;
  }
  JsonWriter& Value(std::string_view value) {
    Comma();
    Quote(value);
    return *this;
  }
  JsonWriter& Value(const char* value) { return Value(std::string_view(value)); }
  JsonWriter& Value(bool value) { return Raw(value ? "true" : "false"); }
  JsonWriter& Value(double value) {
    if (!std::isfinite(value)) return Raw("null");
    char buffer[32];
    std::snprintf(buffer, sizeof(buffer), "%.6g", value);
    return Raw(buffer);
  }
  template <typename T>
  requires(std::is_integral_v<T> && !std::is_same_v<T, bool>) JsonWriter& Value(T value) {
    return Raw(std::to_string(value));
  }
  template <typename T>
  JsonWriter& Field(std::string_view key, T value) {
    return Key(key).Value(value);
  }
  std::string Take() { return std::move(text_); }

 private:
  JsonWriter& Open(char bracket) {
    Comma();
    text_ += bracket;
    fresh_ = true;
    return *this;
  }
  JsonWriter& Close(char bracket) {
    text_ += bracket;
    fresh_ = false;
    return *this;
  }
  JsonWriter& Raw(std::string_view value) {
    Comma();
    text_ += value;
    return *this;
  }
  void Comma() {
    if (!fresh_) text_ += ',';
    fresh_ = false;
  }
  void Quote(std::string_view value) {
    text_ += '"';
    for (const char c : value) {
      const auto byte = static_cast<unsigned char>(c);
      if (c == '"' || c == '\\') {
        text_ += '\\';
        text_ += c;
      } else if (byte < 0x20 || byte == 0x7f) {
        char buffer[8];
        std::snprintf(buffer, sizeof(buffer), "\\u%04x", byte);
        text_ += buffer;
      } else {
        text_ += c;
      }
    }
    text_ += '"';
  }
  std::string text_;
  bool fresh_ = true;
};

}  // namespace slice::gmg
