package wire

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestDropToolsTakesOutNothingElse(t *testing.T) {
	const tools = `"tools": [ {"type":"function","function":{"name":"f","parameters":{}}} ]`
	for body, want := range map[string]string{
		`{"model":"m",` + tools + `, "x" : 1.0 }` + "\n":                                      `{"model":"m", "x" : 1.0 }` + "\n",
		`{ ` + tools + ` ,"model":"m"}`:                                                       `{"model":"m"}`,
		`{"model":"m" , ` + tools + `}`:                                                       `{"model":"m" }`,
		`{` + tools + `,"tool_choice":"auto","parallel_tool_calls":true,"model":"m"}`:         `{"model":"m"}`,
		`{"model":"m",` + tools + `,"tool_choice":"none"}`:                                    `{"model":"m"}`,
		`{"tool_choice":"auto","model":"m","to\u006fls":[{"a":1}],"z":"\"tools\":[1]"}`:       `{"model":"m","z":"\"tools\":[1]"}`,
		`{"messages":[{"role":"user","content":"say tool_calls"}],` + tools + `,"model":"m"}`: `{"messages":[{"role":"user","content":"say tool_calls"}],"model":"m"}`,
		`{"messages":[{"role":"assistant","tool_calls":[]}],` + tools + `,"model":"m"}`:       `{"messages":[{"role":"assistant","tool_calls":[]}],"model":"m"}`,
	} {
		got, ok := DropTools(nil, []byte(body))
		if !ok || string(got) != want {
			t.Errorf("%s\ngot  %s %v\nwant %s", body, got, ok, want)
		}
	}
	for _, body := range []string{
		`{"model":"m"}`,
		`{"model":"m","tool_choice":"auto"}`,
		`{"model":"m",` + tools + `,"tool_choice":"required"}`,
		`{"model":"m",` + tools + `,"tool_choice":{"type":"function","function":{"name":"f"}}}`,
		`{"model":"m",` + tools + `,"messages":[{"role":"user"},{"role":"assistant","tool_calls":[{"id":"1"}]}]}`,
		`{"model":"m",` + tools + `,"messages":[{"content":"x","role":"tool"}]}`,
	} {
		if got, ok := DropTools(nil, []byte(body)); ok {
			t.Errorf("%s\nthe tools were taken out: %s", body, got)
		}
	}
}

// Whatever stands round them in whatever order: what is left is the same object
// without these members.
func TestDropToolsLeavesTheRest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		members := map[string]string{"model": `"m"`, "tools": `[{"a":[1,{"b":"},{"}]}]`, "tool_choice": `"auto"`, "stream": "true", "x": `[1, "a,b"]`, "y": `{"tools": [1]}`}
		keys := rapid.Permutation([]string{"model", "tools", "tool_choice", "stream", "x", "y"}).Draw(t, "order")
		space := rapid.SampledFrom([]string{"", " ", "\n\t"})
		var b strings.Builder
		b.WriteString("{")
		for i, k := range keys {
			if i > 0 {
				b.WriteString(",")
			}
			b.WriteString(space.Draw(t, "a") + `"` + k + `"` + space.Draw(t, "b") + ":" + space.Draw(t, "c") + members[k] + space.Draw(t, "d"))
		}
		b.WriteString("}")
		got, ok := DropTools(nil, []byte(b.String()))
		var have, want map[string]any
		if err := json.Unmarshal(got, &have); !ok || err != nil {
			t.Fatalf("%s\n%s: %v %v", b.String(), got, ok, err)
		}
		if err := json.Unmarshal([]byte(b.String()), &want); err != nil {
			t.Fatal(err)
		}
		delete(want, "tools")
		delete(want, "tool_choice")
		if !reflect.DeepEqual(have, want) {
			t.Fatalf("%s\n%s", b.String(), got)
		}
	})
}
