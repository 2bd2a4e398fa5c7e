// A tenant that runs tests/golden/mlp.textproto through libslice: relu(x[s,16] @ w1[16,32]) @
// w2[32,8], and can compute the same by itself.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <string>
#include <vector>

#include "common/check.h"
#include "common/fd.h"
#include "slice/slice.h"
#include "tests/testing/template_builder.h"

namespace slice::testing {

class MlpTenant {
 public:
  static constexpr uint32_t kIn = 16, kHidden = 32, kOut = 8, kRows = 8;
  static constexpr uint64_t kInBytes = kRows * kIn * 4, kOutBytes = kRows * kOut * 4;
  static constexpr uint64_t kW1Bytes = kIn * kHidden * 4, kW2Bytes = kHidden * kOut * 4;

  struct Options {
    uint32_t service_class = SLICE_CLASS_DEFAULT;
    const char* home = nullptr;
    bool replicate = false;
    const char* model = nullptr;  // the template's name; the golden file's if null
  };

  // status() says whether everything was set up.
  explicit MlpTenant(const std::string& socket) : MlpTenant(socket, Options{}) {}
  MlpTenant(const std::string& socket, const Options& options) { status_ = Open(socket, options); }
  ~MlpTenant() { slice_session_close(session_); }
  MlpTenant(const MlpTenant&) = delete;
  MlpTenant& operator=(const MlpTenant&) = delete;

  slice_status_t status() const { return status_; }
  slice_session_t* session() const { return session_; }
  slice_binding_t binding() const { return binding_; }

  struct Request {
    slice_ticket_t ticket = 0;
    uint64_t in = 0, out = 0;
    const float* x = nullptr;
    const float* y = nullptr;
  };
  slice_status_t Submit(uint32_t seed, Request* request, slice_sequence_t sequence = 0) {
    void* memory = nullptr;
    slice_status_t status = slice_arena_alloc(session_, kInBytes, &request->in, &memory);
    if (status != SLICE_OK) return status;
    float* x = static_cast<float*>(memory);
    for (uint32_t i = 0; i < kRows * kIn; ++i) x[i] = Number(seed + i);
    request->x = x;
    status = slice_arena_alloc(session_, kOutBytes, &request->out, &memory);
    if (status != SLICE_OK) return status;
    request->y = static_cast<const float*>(memory);
    const int64_t symbol = kRows;
    const slice_slot_t input{request->in, kInBytes}, output{request->out, kOutBytes};
    slice_submit_args_t args{};
    args.size = sizeof args;
    args.binding = binding_;
    args.sequence = sequence;
    args.symbol_count = 1;
    args.symbols = &symbol;
    args.inputs = &input;
    args.input_count = 1;
    args.outputs = &output;
    args.output_count = 1;
    return slice_submit(session_, &args, &request->ticket);
  }
  slice_status_t Wait(Request* request) {
    const slice_status_t status = slice_wait(session_, request->ticket, kPatienceNs, nullptr);
    slice_arena_free(session_, request->in);
    slice_arena_free(session_, request->out);
    return status;
  }
  // One request, start to end. `result`: the output.
  slice_status_t Run(uint32_t seed, std::vector<float>* result = nullptr, bool* right = nullptr) {
    Request request;
    slice_status_t status = Submit(seed, &request);
    if (status != SLICE_OK) return status;
    status = slice_wait(session_, request.ticket, kPatienceNs, nullptr);
    if (status == SLICE_OK && result != nullptr)
      result->assign(request.y, request.y + kRows * kOut);
    if (status == SLICE_OK && right != nullptr) *right = IsRight(request.x, request.y);
    slice_arena_free(session_, request.in);
    slice_arena_free(session_, request.out);
    return status;
  }
  bool IsRight(const float* x, const float* y) const {
    for (uint32_t row = 0; row < kRows; ++row) {
      float hidden[kHidden];
      for (uint32_t h = 0; h < kHidden; ++h) {
        float sum = 0;
        for (uint32_t i = 0; i < kIn; ++i) sum += x[row * kIn + i] * weights_[i * kHidden + h];
        hidden[h] = sum > 0 ? sum : 0;
      }
      for (uint32_t o = 0; o < kOut; ++o) {
        float sum = 0;
        for (uint32_t h = 0; h < kHidden; ++h)
          sum += hidden[h] * weights_[kIn * kHidden + h * kOut + o];
        const float difference = y[row * kOut + o] - sum;
        if (!(difference < 1e-3f && difference > -1e-3f)) return false;
      }
    }
    return true;
  }

 private:
  static constexpr int64_t kPatienceNs = 60'000'000'000;
  // Small numbers of both signs.
  static float Number(uint32_t i) {
    return static_cast<float>((i * 2654435761u >> 24) % 17) / 8.0f - 1.0f;
  }

  slice_status_t Open(const std::string& socket, const Options& options) {
    slice_session_options_t open{};
    open.size = sizeof open;
    open.socket_path = socket.c_str();
    open.name = "mlp";
    open.service_class = options.service_class;
    open.arena_bytes = 4 << 20;
    open.home_device = options.home;
    slice_status_t status = slice_session_open(&open, &session_);
    if (status != SLICE_OK) return status;
    proto::GraphTemplate graph_template = ReadTextTemplate(SLICE_GOLDEN_DIR "/mlp.textproto");
    if (options.model != nullptr) graph_template.mutable_metadata()->set_model(options.model);
    const std::string program = graph_template.SerializeAsString();
    slice_graph_t graph = 0;
    status = slice_graph_register(session_, program.data(), program.size(), &graph);
    if (status != SLICE_OK) return status;
    weights_.resize((kW1Bytes + kW2Bytes) / 4);
    for (uint32_t i = 0; i < weights_.size(); ++i) weights_[i] = Number(i * 7 + 3);
    const Fd memfd = CreateMemfd("mlp-weights", kW1Bytes + kW2Bytes).value();
    const Mapping mapping = Mapping::Map(memfd, kW1Bytes + kW2Bytes, true).value();
    std::memcpy(mapping.data(), weights_.data(), mapping.bytes());
    slice_tensor_spec_t specs[2] = {};
    specs[0] = {sizeof specs[0], "w1", SLICE_DTYPE_FLOAT32, 2, {kIn, kHidden}, {}, 0};
    specs[1] = {sizeof specs[1], "w2", SLICE_DTYPE_FLOAT32, 2, {kHidden, kOut}, {}, kW1Bytes};
    slice_tensor_t tensors[2] = {};
    status = slice_tensor_import(session_, memfd.get(), SLICE_TENSOR_CONSTANT, specs, 2, tensors);
    if (status != SLICE_OK) return status;
    if (options.replicate) status = slice_tensor_replicate(session_, tensors, 2, nullptr, 0);
    if (status != SLICE_OK) return status;
    return slice_binding_create(session_, graph, tensors, 2, &binding_);
  }

  slice_status_t status_ = SLICE_ERR_INTERNAL;
  slice_session_t* session_ = nullptr;
  slice_binding_t binding_ = 0;
  std::vector<float> weights_;
};

}  // namespace slice::testing
