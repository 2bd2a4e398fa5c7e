"""Generated protobuf modules, checked in so that the package needs no protoc.

Regenerate with:
  protoc -I include/slice/proto --python_out=torch_plugin/slicescheduler/_proto template.proto
"""
